"""A generator's policies: learned state passes from request to request, and no two requests share one at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

from spec_stack.controller.base import Policy
from spec_stack.controller.registry import CLOCK_POLICY_NAMES, make_policy

Thing = TypeVar("Thing")


class ObjectPool(Generic[Thing]):
    """Lends stateful objects, one to a request at a time. Thread-safe. make: makes a new one where all are lent. name:
    of what is lent."""

    def __init__(self, make: Callable[[], Thing], name: str = "") -> None:
        self._make, self.name = make, name
        self._idle: list[Thing] = []
        self._lock = Lock()

    @contextmanager
    def lend(self) -> Iterator[Thing]:
        with self._lock:
            thing = self._idle.pop() if self._idle else self._make()
        try:
            yield thing
        finally:
            with self._lock:
                self._idle.append(thing)


def check_gamma(gamma: int | None, policy: str | Policy | None) -> None:
    """Raise ValueError for a gamma with another policy than "fixed"."""
    if gamma is not None and policy is not None and policy != "fixed":
        raise ValueError("gamma sets the fixed policy; give gamma or another policy, not both")


class PolicyPool:
    """Chooses requests' policies, which keep their learned state under a name. Thread-safe. Raises ValueError where the
    default is no policy.

    default: for requests that name none. options: policy options by name.
    """

    def __init__(self, default: str | Policy, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._default = default
        self._options = dict(options or {})
        # By repr: as dictionary keys True, 1 and 1.0 are one.
        self._pools: dict[str, ObjectPool[Policy]] = {}
        self._lock = Lock()
        self.choose()

    def choose(
        self, policy: str | Policy | None = None, gamma: int | None = None, is_seeded: bool = False
    ) -> ObjectPool[Policy]:
        """The pool that lends a request's policy. Raises ValueError for an unknown name or option, and for a gamma
        beside another policy.

        gamma: short for "fixed" with this gamma. is_seeded: the call must reproduce its tokens. Clock policies vary
        between runs, so "fixed" replaces the generator's own, and one that the call names starts afresh.
        """
        check_gamma(gamma, policy)
        if gamma is not None:
            return self._pool_of("fixed", {"gamma": gamma})
        if policy is None:
            policy = "fixed" if is_seeded and self._default in CLOCK_POLICY_NAMES else self._default
        if isinstance(policy, Policy):
            return ObjectPool(lambda: policy, policy.name)
        if not isinstance(policy, str):
            raise ValueError(f"policy must be a name or an object of a class Mine(Policy), got {policy!r}")
        return self._pool_of(policy, self._options.get(policy, {}), is_seeded)

    def _pool_of(self, name: str, options: Mapping[str, Any], is_fresh: bool = False) -> ObjectPool[Policy]:
        """The pool of a policy; is_fresh: a new one, without learned state."""
        key = repr((name, sorted(options.items())))
        with self._lock:
            if key not in self._pools:
                pool = ObjectPool(partial(make_policy, name, **options), name)
                # Making a policy checks the choice; it is kept for its first request.
                with pool.lend():
                    self._pools[key] = pool
            return ObjectPool(partial(make_policy, name, **options), name) if is_fresh else self._pools[key]
