"""What can go wrong between the miner and its subnet."""

from __future__ import annotations

from core.errors import ConfigError, GodMinerError


class ChainError(GodMinerError):
    """The chain said no, or said something unexpected."""

    code = "chain"


class ChainUnavailable(ChainError):
    """The node can't be reached, does not answer, or answers nonsense. Asking again later may help."""

    code = "chain_unavailable"


class WrongChain(ChainError):
    """The node serves another chain than the one that was asked for."""

    code = "wrong_chain"


class NoSuchSubnet(ChainError):
    code = "no_such_subnet"


class AxonAddressError(ChainError):
    """An address that validators could not reach must not be published."""

    code = "bad_axon_address"


class IdentityMissing(ChainError):
    """Something has to be signed and there is no key to sign it with."""

    code = "no_identity"


class NodesFileError(ConfigError):
    code = "bad_nodes_file"
