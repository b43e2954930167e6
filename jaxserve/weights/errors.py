"""Typed errors about a model that was asked for. Each names the file, the field and the value."""


class ModelError(ValueError):
    """A model that cannot be served."""


class ModelNotFound(ModelError):
    """Nothing by that name: no such path, no such Hugging Face id, or the hub is out of reach."""


class UnsupportedModel(ModelError):
    """A sound checkpoint that asks for something that this version does not compute."""


class CorruptCheckpoint(ModelError):
    """Files that are truncated, incomplete, or contradict each other."""
