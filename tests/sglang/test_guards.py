"""A failure of the plugin's own is logged with its traceback and counted."""

from __future__ import annotations

import logging

import pytest

from spec_stack.sglang.errors import log_and_continue, num_failures


def test_a_failure_ends_its_block_alone_and_tracebacks_do_not_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            with log_and_continue("a test of many", "nothing is lost"):
                raise KeyError(f"from within {number}")
    assert caplog.text.count("a test of many failed; nothing is lost") == 20
    assert "KeyError: 'from within 0'" in caplog.text
    assert num_failures()["a test of many"] == 50
    with caplog.at_level(logging.ERROR), log_and_continue("a test of many", "nothing is lost"):
        raise ValueError("another failure")
    assert "another failure" in caplog.text


def test_what_a_client_did_wrong_is_raised() -> None:
    before = num_failures().get("a test of a client", 0)
    with pytest.raises(ValueError, match="from a client"), log_and_continue("a test of a client", "", ValueError):
        raise ValueError("from a client")
    assert num_failures().get("a test of a client", 0) == before
