"""Shadows that a launcher started tell each other, and trainers, where they listen: torch's store at MASTER_ADDR."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lastgood._lazy import dist
from lastgood.errors import ConfigError, HostError
from lastgood.gradients.shadow.launch_env import Place

__all__ = ["Rendezvous", "ask_addresses"]

_KEY = "lastgood/shadow/{}"
_PORTS = 1 << 16


class Rendezvous:
    """A store at MASTER_ADDR and MASTER_PORT; keep it as long as others may ask it.

    torchrun's agent, or rank 0 of the trainers, has one there already; if shadows are alone, the first makes it.
    Raises ConfigError if the environment names no store, HostError if it cannot be reached in `timeout_s`.
    """

    def __init__(self, environment: Mapping[str, str], place: Place, timeout_s: float) -> None:
        host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if not host or not port.isdecimal():
            raise ConfigError("a rendezvous needs MASTER_ADDR and MASTER_PORT, as torchrun sets them")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        alone = environment.get("WORLD_SIZE", str(place.shadows)) == str(place.shadows)
        self._where = f"{host}:{port}"
        self._timeout_s = timeout_s
        self._shadows = place.shadows
        self._store = _open_store(host, int(port), alone and not agent and place.shadow == 0, timeout_s, self._where)

    def exchange(self, shadow: int, address: str) -> list[str]:
        """Tell this shadow's address; return those of all.

        Raises HostError if one does not come in time, or the store has gone.
        """
        try:
            self._store.set(_KEY.format(shadow), address)
        except RuntimeError as error:
            raise HostError(f"the store at {self._where} takes no address of shadow {shadow}: {error}") from error
        return _addresses(self._store, self._where, self._shadows, self._timeout_s)


def ask_addresses(host: str, port: int, shadows: int, timeout_s: float) -> list[str]:
    """The addresses that `shadows` shadows have told at this store, for their trainers.

    Raises HostError if it cannot be reached, or one does not come, in `timeout_s` each.
    """
    where = f"{host}:{port}"
    return _addresses(_open_store(host, port, False, timeout_s, where), where, shadows, timeout_s)


def _open_store(host: str, port: int, is_master: bool, timeout_s: float, where: str) -> Any:
    if port >= _PORTS:
        raise ConfigError(f"no store can be at {where}: a port (MASTER_PORT) is below {_PORTS}")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch has it where it has distributed
            host, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise HostError(f"no store at {where}: {error}") from error


def _addresses(store: Any, where: str, shadows: int, timeout_s: float) -> list[str]:
    found = []
    for number in range(shadows):
        try:
            found.append(store.get(_KEY.format(number)).decode())
        except RuntimeError as error:
            raise HostError(f"waited {timeout_s:g} s for the address of shadow {number} at {where}") from error
    return found
