"""One daemon for all that is thrown at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.miner.http.daemon_process import MANY_FAILURES, DaemonProcess, run_daemon_process

OPEN = {
    "MAX_JOBS": "10000",
    "miner.server.BODY_SECONDS": "1",
    **MANY_FAILURES,
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with run_daemon_process(tmp_path_factory.mktemp("fuzzed"), OPEN) as daemon:
        yield daemon
        assert daemon.is_alive()
    # That its requests cannot be read is an alert, and rightly so.
    logged = daemon.logged("WARNING", "ERROR", "CRITICAL")
    assert [line for line in logged if not line["msg"].startswith("alert protocol-invalid,")] == []
