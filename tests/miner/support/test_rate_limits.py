from miner.support.addresses import client_network
from miner.support.rate_limits import RateLimit, TokenBuckets


def test_a_bucket_gives_its_burst_then_its_rate_and_a_clock_that_goes_back_takes_nothing() -> None:
    now = 0.0
    buckets = TokenBuckets(RateLimit(per_second=2, burst=3), clock=lambda: now)
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]
    assert buckets.is_empty("a")
    assert buckets.seconds_until_next("a") == 0.5
    now = 0.5
    assert [buckets.take("a"), buckets.take("a")] == [True, False]
    now = 1.5
    assert buckets.take("a")
    now = -100.0
    assert not buckets.is_empty("a")


def test_the_table_is_bounded_and_forgets_the_least_recent_and_reading_stores_nothing() -> None:
    buckets = TokenBuckets(RateLimit(per_second=0.001, burst=1), max_keys=100, clock=lambda: 0.0)
    assert not buckets.is_empty("never taken from")
    assert len(buckets) == 0
    assert all(buckets.take(key) for key in range(1000)), "keys do not share"
    assert len(buckets) == 100
    assert buckets.is_empty(999)
    assert not buckets.is_empty(0)


def test_an_ipv6_customer_counts_as_one() -> None:
    assert client_network("2001:db8::1") == client_network("2001:db8::2") != client_network("2001:db8:0:1::1")
    assert client_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_network("192.0.2.7") == "192.0.2.7"
    assert client_network("not an address") == "not an address"
