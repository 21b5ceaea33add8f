from miner.support.addresses import client_network
from miner.support.rate_limits import RateLimit, TokenBuckets


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    clock = Clock()
    buckets = TokenBuckets(RateLimit(per_second=2, burst=3), clock=clock)
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]
    assert buckets.is_empty("a")
    assert buckets.seconds_until_next("a") == 0.5
    clock.now += 0.5
    assert [buckets.take("a"), buckets.take("a")] == [True, False]


def test_keys_do_not_share() -> None:
    buckets = TokenBuckets(RateLimit(per_second=1, burst=1), clock=Clock())
    assert buckets.take("a")
    assert buckets.take("b")
    assert not buckets.take("a")


def test_the_table_is_bounded_and_forgets_the_least_recent() -> None:
    buckets = TokenBuckets(RateLimit(per_second=0.001, burst=1), max_keys=100, clock=Clock())
    for key in range(1000):
        buckets.take(key)
    assert len(buckets) == 100
    assert buckets.is_empty(999)
    assert not buckets.is_empty(0)


def test_reading_a_key_stores_nothing() -> None:
    buckets = TokenBuckets(RateLimit(per_second=1, burst=1), clock=Clock())
    assert not buckets.is_empty("a")
    assert len(buckets) == 0


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    clock = Clock()
    buckets = TokenBuckets(RateLimit(per_second=1, burst=2), clock=clock)
    buckets.take("a")
    clock.now = -100
    assert not buckets.is_empty("a")


def test_an_ipv6_customer_counts_as_one() -> None:
    assert client_network("2001:db8::1") == client_network("2001:db8::2") != client_network("2001:db8:0:1::1")
    assert client_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_network("192.0.2.7") == "192.0.2.7"
    assert client_network("not an address") == "not an address"
