"""spec-stack generate | chat | prune | serve | proxy | demo | bench | explain | calibrate | doctor."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from time import monotonic, perf_counter, process_time
from typing import TYPE_CHECKING, Any

from spec_stack.cli.arguments import (
    DEMO_TOKENS,
    PAIR,
    answer_options,
    build_parser,
    check_writable,
    config_of,
    given,
    prompt_of,
    read_documents,
    read_prompt,
    read_prunable,
    request_of,
)
from spec_stack.cli.chat import Chat, read_document, status_line, system_messages
from spec_stack.cli.progress import ProgressLine
from spec_stack.config import DecodeConfig, LoadConfig, PrefillConfig, SessionConfig, SpecStackConfig, how_to_install
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig
from spec_stack.settings.plugins import import_plugins
from spec_stack.settings.registry import check_name

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator
    from spec_stack.api.pruner import Pruner
    from spec_stack.bench.leaderboard import Leaderboard
    from spec_stack.types import StepOutput

logger = logging.getLogger("spec_stack.cli")


def _load(arguments: argparse.Namespace, config: SpecStackConfig | None = None) -> SpecStackGenerator:
    from spec_stack.api.generator import SpecStackGenerator

    return SpecStackGenerator.from_pretrained(**given(arguments, (*PAIR, "calibration")), config=config)


def _tell(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def _tell_dropped(arguments: argparse.Namespace, num_kept: int, num_tokens: int) -> None:
    """Say that a part of the prompt was dropped, if it was."""
    if num_kept < num_tokens and not arguments.quiet:
        whole = "" if arguments.command == "prune" else "--sparse-prefill off reads all, "
        _tell(f"spec-stack: kept {num_kept} of {num_tokens} prompt tokens; {whole}--quiet hides this line")


def _tell_embedded(arguments: argparse.Namespace) -> None:
    """Say that no real model answers."""
    if arguments.target is None and arguments.draft is None and not arguments.quiet:
        _tell(
            "spec-stack: the embedded test pair answers, two tiny models of Python code; --target and --draft name "
            "yours"
        )


def _generate(arguments: argparse.Namespace) -> int:
    prompt = read_prompt(arguments)
    request = request_of(arguments)
    generator = _load(arguments, SpecStackConfig(prefill=config_of(PrefillConfig, arguments)))
    _tell_embedded(arguments)
    request |= prompt_of(arguments, prompt, getattr(generator.tokenizer, "chat_template", None) is not None)
    outputs: list[StepOutput] = []
    line = ProgressLine()
    try:
        for output in generator.stream(**request, on_progress=line):
            outputs.append(output)
            if not arguments.json:
                print(output.text, end="", flush=True)
    finally:
        line.clear()
    last = outputs[-1]
    if last.metrics is None:
        raise RuntimeError("the stream ended without a last step")
    if arguments.json:
        answer = {
            "text": "".join(output.text for output in outputs),
            "token_ids": [token_id for output in outputs for token_id in output.token_ids],
            "finish_reason": last.finish_reason,
            "metrics": last.metrics.as_dict(),
        }
        print(json.dumps(answer))
    else:
        print()
    _tell_dropped(arguments, last.metrics.num_kept_tokens, last.metrics.num_prompt_tokens)
    if arguments.stats:
        _tell(f"{status_line(last.metrics)}\n{last.metrics.sparse_prefill_reason}")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise ValueError("chat reads standard input, which is closed")
    documents, options = [read_document(path) for path in arguments.file], answer_options(arguments)
    config = SpecStackConfig(config_of(PrefillConfig, arguments), session=config_of(SessionConfig, arguments))
    told = partial(_tell_dropped, arguments)
    generator = _load(arguments, config)
    _tell_embedded(arguments)
    Chat(generator, options, arguments.system, documents, told=told).run()
    return 0


def _load_pruner(arguments: argparse.Namespace, config: PrefillConfig | None = None) -> Pruner:
    from spec_stack.api.pruner import Pruner

    return Pruner.from_pretrained(
        arguments.draft,
        arguments.tokenizer,
        config=config,
        precision=getattr(arguments, "draft_precision", LoadConfig.draft_precision),
        device=arguments.device,
        calibration=arguments.calibration,
    )


def _prune(arguments: argparse.Namespace) -> int:
    prunable, restored = read_prunable(arguments.file)
    result = _load_pruner(arguments, PrefillConfig(**given(arguments, ("scorer",)))).prune(
        prunable,
        **given(arguments, ("keep_rate", "max_tokens", "question", "protect", "marker", "max_dropped_attention")),
    )
    shorter = result.messages if restored is None else restored(result.messages)
    if arguments.json:
        print(json.dumps({**asdict(result), "messages": shorter}))
    elif restored is None:
        sys.stdout.write(shorter)
    else:
        print(json.dumps(shorter))
    if restored is None and _is_json(prunable) and not _is_json(shorter):
        _tell("spec-stack: this JSON is no request's body; it was shortened as a text, and the result is no JSON")
    if not arguments.explain:
        _tell_dropped(arguments, result.num_kept_tokens, result.num_tokens)
        if arguments.max_tokens and result.num_kept_tokens > arguments.max_tokens and not arguments.quiet:
            _tell(f"spec-stack: {result.reason}")
    if arguments.explain:
        _tell(f"kept {result.num_kept_tokens} of {result.num_tokens} tokens; {result.reason}")
        for kept in result.kept:
            spans = ", ".join(f"{start}-{stop}" for start, stop in kept.spans)
            part = "" if kept.part is None else f", part {kept.part}"
            _tell(f"message {kept.message}{part}: characters {spans or 'none'}")
    return 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _serve(arguments: argparse.Namespace) -> int:
    arguments.api_keys += filter(None, [os.environ.get("SPEC_STACK_API_KEY")])
    config = config_of(ServeConfig, arguments)
    from spec_stack.http.app import begin
    from spec_stack.serve.app import run

    begin(config, config.port)
    generator = _load(
        arguments, SpecStackConfig(config_of(PrefillConfig, arguments), config_of(DecodeConfig, arguments))
    )
    pair = generator.pair
    target = f"{arguments.target or 'the embedded target'} ({pair.precision})"
    draft = f"{arguments.draft or 'the embedded draft'} ({pair.draft_precision})"
    what = describe_pruning(generator.config.prefill)
    logger.info("spec-stack: %s with %s on %s; %s", target, draft, pair.target.device, what)
    run(generator, config)
    return 0


def describe_pruning(config: PrefillConfig) -> str:
    """What is dropped of prompts, in words."""
    if config.sparse_prefill in ("off", "draft_only"):
        return "prompts are read whole"
    which = (
        f"prompts of {config.min_prompt_tokens} tokens and more" if config.sparse_prefill == "auto" else "every prompt"
    )
    rate = str(config.keep_rate)
    if isinstance(config.keep_rate, tuple):
        rate = ", ".join(f"{share} at {length} tokens" for length, share in config.keep_rate)
    return f"of {which} a share of {rate} is kept, which is lossy"


def _proxy(arguments: argparse.Namespace) -> int:
    config, prefill = config_of(ProxyConfig, arguments), config_of(PrefillConfig, arguments)
    from spec_stack.http.app import begin
    from spec_stack.proxy.app import serve_proxy

    begin(config, config.port)
    pruner = _load_pruner(arguments, prefill)
    draft = f"{arguments.draft or 'the embedded draft'} ({pruner.precision}) on {pruner.device}"
    logger.info("spec-stack: %s in front of %s; %s", draft, config.upstream, describe_pruning(pruner.config))
    if arguments.draft is None:
        logger.warning("spec-stack: the embedded test draft, a tiny model of Python code, prunes; --draft names yours")
    serve_proxy(pruner, config)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from spec_stack.bench.demo import run_demo
    from spec_stack.cli.reports import format_demo

    if arguments.repeats < 1 or arguments.tokens < 1:
        raise ValueError("--repeats and --tokens must be 1 or more")
    report = run_demo(_load(arguments), arguments.tokens, arguments.seed, arguments.repeats, progress=_tell)
    print(json.dumps(report) if arguments.json else "\n" + format_demo(report))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from spec_stack.bench.recorded import read, registered, replay_policies

    for path in filter(None, (arguments.rows, arguments.record, arguments.csv, arguments.plot)):
        check_writable(path)
    if arguments.plot and not find_spec("matplotlib"):
        raise ValueError("--plot needs matplotlib; pip install matplotlib, or leave --plot out")
    policies = registered(arguments.policies) if arguments.policies else None
    if arguments.records:
        if arguments.prompts or arguments.target or arguments.draft:
            raise ValueError("records are replayed without models and prompts; leave them out, or the records")
        cold, folds = arguments.cold, arguments.folds
        board = replay_policies(read(arguments.records), policies, num_folds=folds, experienced=not cold)
    else:
        board = _bench_live(arguments)
    if arguments.csv:
        board.write_csv(arguments.csv)
    if arguments.plot:
        board.plot(arguments.plot)
    print(json.dumps(board.as_dict()) if arguments.json else board.table())
    return 0


def _bench_live(arguments: argparse.Namespace) -> Leaderboard:
    from spec_stack.bench.live import bench, predictors
    from spec_stack.bench.prompts import read_prompts
    from spec_stack.bench.recorded import registered

    prompts = read_prompts(arguments.prompts) if arguments.prompts else None
    _tell("loading the pair …")
    generator = _load(arguments)
    return bench(
        generator,
        prompts,
        registered(arguments.policies, predictors(generator)),
        **given(arguments, ("max_tokens", "minutes", "rivals", "rows")),
        records=arguments.record,
        progress=_tell_progress,
        clock=process_time if arguments.cpu_seconds else perf_counter,
    )


def _tell_progress(num_done: int, num_total: int, text: str) -> None:
    _tell(f"[{num_done:3d}/{num_total}] {text}")


def _calibrate(arguments: argparse.Namespace) -> int:
    from spec_stack.bench.prompts import questions_of, read_prompts
    from spec_stack.calibrate.config import CalibrateConfig
    from spec_stack.calibrate.loss import built_in, check_share, with_bound
    from spec_stack.calibrate.search import QUICK, calibrate, calibrate_heads, format_calibration
    from spec_stack.engine.pair import ModelPair
    from spec_stack.prefill.calibration import FILE_NAME
    from spec_stack.prefill.shipped import file_of

    started = monotonic()
    if (named := arguments.out) is None and arguments.draft is None:
        raise ValueError("name a file or folder for the result with --out")
    out = file_of(arguments.draft) if named is None else Path(named)
    if named is None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if not (out.is_dir() or out.parent.is_dir()):
        raise ValueError(f"name a file or folder for the result with --out; {out.parent} is no folder")
    # Errors must show before minutes of work.
    check_writable(out / FILE_NAME if out.is_dir() else out)
    arguments.budget_s = 60 * arguments.budget
    config = config_of(CalibrateConfig, arguments)
    documents, max_loss = read_documents(arguments.documents), arguments.max_loss
    if arguments.quick:
        if given(arguments, ("prompts", "lengths", "margin", "seed")):
            raise ValueError("--quick has prompts, lengths, margin and seed of its own; leave them out, or --quick")
        config = replace(QUICK, budget_s=config.budget_s)
    if max_loss is None and arguments.loss_prompts is not None:
        raise ValueError("--loss-prompts are for --max-loss; add it, or leave them out")
    prompts = read_prompts(arguments.loss_prompts, with_answers=True) if arguments.loss_prompts is not None else None
    if max_loss is not None:
        check_share(max_loss)
    pair = ModelPair.load(**given(arguments, PAIR), target_weights=max_loss is not None)

    def show(done: int, total: int, what: str) -> None:
        spent = monotonic() - started
        _tell(f"[{done:3d}/{total}, {spent:4.0f} s] {what}")

    measure = calibrate_heads if arguments.quick else calibrate
    calibration = measure(pair, config, documents=documents, progress=show)
    if max_loss is not None:
        questions = questions_of(prompts, pair.tokenizer) if prompts else built_in(pair, config, documents)
        calibration = with_bound(calibration, pair, questions, max_loss, config.budget_s, show)
    print(f"saved to {calibration.save(out)}, after {monotonic() - started:.0f} s")
    print(format_calibration(calibration))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from spec_stack.explain.page import explain_live, file_name, render

    if arguments.demo and (arguments.prompt is not None or arguments.file is not None):
        raise ValueError("--demo explains a prompt of its own; leave it out, or the prompt and --file")
    text, options = None if arguments.demo else read_prompt(arguments), answer_options(arguments)
    source = "demo" if arguments.demo else "prompt" if arguments.file is None else arguments.file.name
    out = arguments.out or Path(file_name(Path(source).stem, text or ""))
    check_writable(out)
    generator = _load(arguments, SpecStackConfig(prefill=config_of(PrefillConfig, arguments)))
    if text is None:
        from spec_stack.bench.demo import hide_fact

        text = str(hide_fact(generator.tokenizer, DEMO_TOKENS, 0).messages[0]["content"])
    is_chat = arguments.demo or arguments.chat or arguments.turn or arguments.system is not None
    explanation = explain_live(
        generator,
        source=source,
        pair=f"{arguments.target or 'embedded target'} with {arguments.draft or 'embedded draft'}",
        options=options,
        messages=system_messages(arguments.system) if is_chat else None,
        questions=[text, *arguments.turn],
        compare=arguments.compare,
    )
    page, turns = render(explanation), explanation["turns"]
    out.write_text(page, encoding="utf-8")
    _tell_embedded(arguments)
    for turn in turns:
        print(turn["text"].strip())
        if arguments.quiet:
            continue
        for query in turn["queries"][:3]:
            _tell(f"scoring query, weight {query['weight']:.2f}: {shorten(query['text'], 96, placeholder=' …')}")
        _tell(f"{turn['metrics']['num_kept_tokens']} of {turn['metrics']['num_prompt_tokens']} prompt tokens kept")
    _tell(f"page: {out.resolve()}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.sglang:
        from spec_stack.sglang.launch import as_text, check_launch

        report = check_launch(arguments.server_args)
        print(json.dumps(report) if arguments.json else as_text(report))
        return 1 if report["problem"] else 0
    if arguments.server_args:
        raise ValueError(f"unknown arguments {' '.join(arguments.server_args)}; a server's follow after --sglang --")
    if (arguments.prompts or arguments.documents) and not arguments.measure:
        raise ValueError("--prompts and --documents go with --measure")
    is_of_prompts = arguments.keep_rates or arguments.rows or arguments.max_dropped_attention is not None
    if is_of_prompts and not (arguments.prompts or arguments.documents):
        raise ValueError("--keep-rates, --max-dropped-attention and --rows go with --prompts or --documents")
    from spec_stack.cli.doctor import diagnose, report_text

    report = diagnose(**given(arguments, PAIR))
    if arguments.measure and not report["problem"]:
        report |= _measured(arguments)
    print(json.dumps(report) if arguments.json else report_text(report))
    return 1 if report["problem"] else 0


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measurements of a pair on this machine: by built-in prompts, or by the given ones."""
    from spec_stack.bench.pair import measure_pair
    from spec_stack.cli.reports import pair_lines

    if not arguments.minutes > 0:
        raise ValueError(f"--minutes must be over 0, got {arguments.minutes}")
    if arguments.prompts or arguments.documents:
        return {"fidelity": _measured_fidelity(arguments)}
    _tell("loading the pair and timing it …")
    return {"measured": pair_lines(measure_pair(_load(arguments), arguments.minutes))}


def _measured_fidelity(arguments: argparse.Namespace) -> Any:
    """What pruning does to the given prompts, as lines or for JSON."""
    from spec_stack.bench.fidelity import KEEP_RATES, measure_fidelity
    from spec_stack.bench.prompts import document_prompts, read_prompts
    from spec_stack.cli.reports import fidelity_lines

    first = arguments.prompts or arguments.documents[0]
    rows = arguments.rows or first.with_suffix(".measured.jsonl")
    prompts: list[Any] = read_prompts(arguments.prompts) if arguments.prompts else []
    documents = {str(path): read_document(path) for path in arguments.documents}
    check_writable(rows)
    _tell("loading the pair …")
    generator = _load(arguments)
    prompts += document_prompts(documents, generator.tokenizer, min(generator.pair.max_positions))
    keep_rates = arguments.keep_rates or KEEP_RATES
    report = measure_fidelity(
        generator,
        prompts,
        keep_rates,
        max_dropped_attention=arguments.max_dropped_attention,
        minutes=arguments.minutes,
        rows=rows,
        progress=_tell_progress,
    )
    _tell(f"every prompt has a row in {rows}; delete it to measure again")
    return report.as_dict() if arguments.json else fidelity_lines(report)


def _in_words(error: Exception) -> str:
    """One line, also of a library's error of several, and without the number of a file's error."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "generate": _generate,
    "chat": _chat,
    "prune": _prune,
    "demo": _demo,
    "bench": _bench,
    "calibrate": _calibrate,
    "explain": _explain,
    "serve": _serve,
    "proxy": _proxy,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 done, 1 the pair does not fit (doctor), 2 bad input, 130 interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed (>&-): what is said goes nowhere, and no file that is opened takes its place.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character outside the encoding is escaped, as on stderr; JSON is ASCII.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = argparse.Namespace()
    try:
        # Before the parser is built: it lists registered names.
        import_plugins()
        argv = sys.argv[1:] if argv is None else argv
        if argv and not argv[0].startswith("-"):
            check_name("command", argv[0], COMMANDS)
        arguments = build_parser().parse_args(argv)
        return COMMANDS[arguments.command](arguments)
    except BrokenPipeError:
        # The reader has closed the pipe; without this the interpreter fails when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:
        is_extra = isinstance(error, ImportError) and getattr(arguments, "command", None) in ("serve", "proxy")
        problem = f"{error}; {how_to_install('serve')}" if is_extra else _in_words(error)
        if getattr(arguments, "json", False):
            # Standard output may be what failed.
            with suppress(OSError):
                print(json.dumps({"error": problem}), flush=True)
        _tell(f"spec-stack: error: {problem}")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
