from miner.support.addresses import client_network
from miner.support.rate_limits import RateLimit, TokenBuckets, retry_after
from tests.doubles.each import each


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


@each(
    ("header", "seconds"),
    [
        ("2", 2.0),
        (" 1.5 ", 1.0),
        ("99999999999999", 999_999.0),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0.0),
        *((nothing, None) for nothing in (None, "", "soon", "-1", "²", "Fri, 99 Jan 2100 00:00:00 GMT")),
    ],
)
def test_a_header_is_a_number_or_a_date_or_nothing(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_a_date_to_come_is_so_many_seconds_away() -> None:
    assert (retry_after("Fri, 01 Jan 2100 00:00:00 GMT") or 0.0) > 1e8
