"""Whose keys in the draft's pool a prompt may use."""

from __future__ import annotations

from spec_stack import PrefillConfig
from spec_stack.sglang.decide import Prompt
from spec_stack.sglang.draft_radix_cache import DraftRadixCache
from spec_stack.sglang.scoring import _walls


def test_prompts_on_both_sides_of_a_windows_beginning_share_no_keys() -> None:
    config = PrefillConfig(draft_window=(40, 8))
    short, at, longer = (Prompt(tuple(range(length)), None, None, config, "freeze") for length in (39, 40, 90))
    pool = DraftRadixCache(200)
    lease = pool.lease(_walls(short), short.token_ids)
    lease.extend(39)
    lease.insert(39)
    assert pool.num_shared(_walls(short), short.token_ids) == 39
    assert pool.num_shared(_walls(at), at.token_ids) == pool.num_shared(_walls(longer), longer.token_ids) == 0
    assert _walls(at) == _walls(longer)
