"""One short connection to a chain node through the bittensor SDK.

Nothing that the SDK does is trusted to end: version 11.3 hangs for ever when a node closes the socket
cleanly while a request is pending, and takes five minutes to give up on a silent one. So every call has a
time limit, and a connection lives for one piece of work only: the miner looks at the chain every few
minutes, there is nothing to gain from an idle socket, and one that is never kept can not go stale.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from miner.chain.errors import ChainUnavailable, WrongChain
from miner.chain.limits import within

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class Endpoint:
    """Which node to talk to, and for how long to wait for it."""

    node: str
    timeout: float
    #: Further nodes of the same chain; None takes the public ones of a network given by name.
    fallbacks: Sequence[str] | None = None
    cache_dir: Path | None = None

    @property
    def shown(self) -> str:
        """The network's name, or the address without user, path and query, where access tokens live."""
        if "://" not in self.node:
            return self.node
        parts = urlsplit(self.node)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


@dataclass(frozen=True)
class Link:
    """An open connection."""

    endpoint: Endpoint
    sdk: Any
    client: Any
    genesis: str = ""

    async def ask(self, what: str, call: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """One call to the SDK: bounded, and whatever it raises becomes ChainUnavailable.

        The SDK's documented errors are not all there are: a nonsense answer surfaces as AttributeError or
        TypeError from wherever it was first touched.
        """
        node = self.endpoint.shown
        try:
            return await within(seconds or self.endpoint.timeout, call)
        except (self.sdk.BittensorError, TimeoutError, OSError) as error:
            why = str(error).strip() or type(error).__name__
            raise ChainUnavailable(f"{what}: {node} is of no help: {why}") from error
        except Exception as error:  # a boundary: see above
            log.warning("%s: the answer of %s makes no sense to the SDK", what, node, exc_info=True)
            raise ChainUnavailable(
                f"{what}: the answer of {node} makes no sense to the SDK ({error!r}); "
                "try another node with SUBTENSOR_ADDRESS"
            ) from error


@asynccontextmanager
async def linked(endpoint: Endpoint) -> AsyncIterator[Link]:
    """A connection to the endpoint for as long as the block lasts."""
    sdk = await asyncio.to_thread(_import_sdk, endpoint.cache_dir)
    label, substrate = _substrate(sdk, endpoint)
    link = Link(endpoint, sdk, sdk.Client(label, substrate=substrate))
    try:
        # `Client.connect` would do as well, but reads every subnet's token symbol on top and keeps them in
        # a file in the home directory.
        await link.ask("connecting", substrate.connect())
        genesis = await link.ask("reading the genesis hash", substrate.block_hash(0))
        yield Link(endpoint, sdk, link.client, str(genesis))
    finally:
        await _close(link)


def _substrate(sdk: Any, endpoint: Endpoint) -> tuple[str, Any]:
    """The SDK's connection object. Archive nodes are for old blocks, which nobody asks for here."""
    try:
        label, url = sdk.settings.resolve_endpoint(endpoint.node)
    except ValueError as error:
        raise WrongChain(f"SUBTENSOR_NETWORK: {error}") from None
    fallbacks = endpoint.fallbacks
    if fallbacks is None:
        fallbacks = [] if "://" in endpoint.node else sdk.settings.default_fallback_endpoints(label)
    return label, sdk.RpcSubstrate(url, fallback_endpoints=list(fallbacks), archive_endpoints=[])


async def _close(link: Link) -> None:
    """Closing a broken client raises what broke it, and can hang; it matters to nobody."""
    try:
        await within(CLOSE_SECONDS, link.client.close())
    except Exception:
        log.debug("closing the connection to %s failed", link.endpoint.shown, exc_info=True)


def _import_sdk(cache_dir: Path | None) -> Any:
    """Import the SDK: half a second and 45 MB, so on first use and off the event loop."""
    if cache_dir is not None:
        # Where the SDK keeps the chain's metadata, 400 kB per runtime version; its default is in the home
        # directory, which a service account may not have.
        os.environ.setdefault("BITTENSOR_RUNTIME_CACHE_DIR", str(cache_dir))
    try:
        return importlib.import_module("bittensor")
    except ImportError as error:
        raise ChainUnavailable(f"the bittensor SDK can't be imported ({error}): install it again") from error
