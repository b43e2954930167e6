from scheduler.stats import Histogram, Stats


def test_a_bound_is_the_last_value_of_its_bucket() -> None:
    histogram = Histogram((0.1, 0.5, 1.0))
    for value in (0.0, 0.1, 0.2, 0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.sum == 0.0 + 0.1 + 0.2 + 0.5 + 1.0 + 1.5 + 99.0


def test_every_label_is_there_from_the_start() -> None:
    stats = Stats()
    assert stats.preemptions == {"recompute": 0, "swap": 0}
    assert stats.compilations == {"warmup": 0, "serving": 0}
    assert stats.plan_tokens == {"real": 0, "padded": 0}
    assert stats.finished == {"stop": 0, "length": 0, "abort": 0, "error": 0, "timeout": 0}
    assert len(stats.time_to_first_token.counts) == len(stats.time_to_first_token.bounds) + 1


def test_stats_share_nothing() -> None:
    first, second = Stats(), Stats()
    first.finished["stop"] += 1
    first.time_to_first_token.observe(1.0)
    assert second.finished["stop"] == 0
    assert sum(second.time_to_first_token.counts) == 0
