"""Signs that a job runs: training steps, a normal end, communicators that came up.

A log without a failure in it need not be healthy: something must show that the job ran.
Step lines are the bulk of any training log, so of a large block only its head, its tail and
what follows a failure, or lines like one, are read; in between, one more step changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

# Signs are (words, expression): text that has none of the words, in whatever case, is not searched
# for the expression, and one that is not searched for is not compiled: that takes longer than all
# else about a small log. Without words it is searched for at all times.
_Signs = tuple[tuple[tuple[bytes, ...], bytes], ...]

# A number with a percent sign is a bar's, which counts only where it has moved on.
_STEPS: _Signs = (
    (
        (b"tep", b"ter", b"atch"),
        rb"(?:(?<=[Ss])tep|(?<=[Ii])ter(?:ation)?|(?<=[Bb])atch)s?\W{0,8}\d+(?![\d%])[^\n\r]{0,300}?"
        rb"(?:_[Ll]oss|\b(?:[Ll]oss|tok|tokens|sec|it/s|ms|lr|learning rate|samples|grad|elapsed"
        rb"|mem|[Tt]flops?|TFLOPS?))",
    ),
    # A row of nccl-tests: bytes, elements, type, operation and root (not of all), time, bandwidths.
    (
        (b"int", b"float", b"double", b"half", b" f8e"),
        rb" \d+ +\d+ +(?:u?int\d+|float|double|half|bfloat16|f8e\dm\d) +(?:\w+ +){0,2}?(?:-?\d+ +)?"
        rb"\d+\.?\d* +\d+\.\d+",
    ),
    # Rows of figures with the time that is left, whatever their names: yolact's, MMEngine's.
    (
        (b"eta: ",),
        rb"(?:\b[A-Za-z]\w{0,30}: ?\d+\.\d[\d.e+-]*[ ,|;]{1,4}){2}[^\n\r]{0,200}?\b(?i:eta): \d",
    ),
    # What DeepEP's and other tests of bandwidth print of each size.
    ((b"[tuning]",), rb"\[tuning\][^\n]{0,120}?\d GB/s"),
    # Bars of Keras: `5/5 [====] - 4s 60ms/step - loss: 2.3`.
    ((b"/step",), rb"\d/\d{1,12} (?:\[[=>.]{3,}\]|\xe2\x94\x81)[^\n\r]{0,120}/step\b"),
    # What vLLM and SGLang print as long as they answer.
    ((b"avg prompt throughput: ",), rb"Avg prompt throughput: "),
    ((b"decode batch",), rb"Decode batch[^\n]{0,200}throughput"),
    ((b", generated text: ",), rb", Generated text: "),
    # A server of the job's own answers, whatever it calls its work; not what merely controls it.
    (
        (b'"post /',),
        rb"\"POST /(?!\S{0,40}(?:health|ready|ping|metrics|load|reset|sleep|wake|init|update|pause"
        rb"|resume|abort|start|stop|shutdown|register|profile|flush))[^\"\n]{1,60} HTTP/1\.\d\""
        rb" 200\b",
    ),
    # Composer's losses on lines of their own, what Ray Train reports of a trial, verl's metrics.
    ((b"rain loss/",), rb"rain loss/\S{1,40}: \d"),
    ((b"finished iteration ",), rb"finished iteration \d"),
    ((b"step:",), rb"step:\d{1,9} - \w+/"),
    # An epoch's accuracy.
    (
        (b"epoch",),
        rb"\bEpoch\W{1,4}\d{1,6}\W{1,4}(?i:train |valid\w* |test )?(?i:acc\w*)\W{1,3}\d",
    ),
)
# A loss has decimals, where a weight or a share of packets may have none.
_LOSS: _Signs = (((b"oss",), rb"oss'?\W{1,4}\d+(?:\.\d|[Ee][-+]?\d)(?![\d.]*%)"),)
_LOSS_NAME = rb"(?<![\w ])(?:train_|lm |total_|')?[Ll]$|(?<!val) [Ll]$"
# What a name begins with that says how many there are to be, or how often.
_COUNT = (
    rb"(?<![A-Za-z])(?:(?:max|num|n|total)[_ -]?|(?:eval|save|saving|warm_?up|log|logging|accum\w*"
    rb"|decay|checkpoint|ckpt|print)_)[A-Za-z]$"
)
# Before a mark on its line: an option of a command, or the settings that a program was given.
_SETTING = (
    rb"(?:^|\s)--[\w.-]*$"
    rb"|(?i:config\w*|arguments|args|namespace|param\w*|settings|options)(?:\(|[:=] ?[({]?)"
    rb"(?:[^()]|\([^()]*\))*$"
)
# A line of a state that no step has changed yet: `{"step": 0, "loss": 0.0}`.
_UNCHANGED = (
    rb"(?i)(?=[^\n\r]{0,300}step\W{0,4}0(?![\d.%/]))"
    rb"(?=[^\n\r]{0,300}loss\W{1,4}(?:0(?:\.0*)?(?![\d.e])|null\b|none\b))"
)
_ZERO = rb"\w*\W{0,8}0(?:\.0*)?(?![\d.%/eE])"
# The number of a step; that of a batch begins again with each epoch.
_COUNTER = rb"t(?:ep|er(?:ation)?)s?\W{0,8}(\d{1,18})(?![\d.])"
# Lines whose numbers begin again while a run goes on: of an epoch, of an evaluation.
_PART_OF_A_RUN = rb"[^\n\r]{0,400}?(?i:epoch|\bep\b|\bval|eval|test|predict|infer|sampl|generat)"
# A line of settings: one name, and a value of few digits.
_ROUND = rb"^\s*[\"']?\w*oss[\"']?\s?[:=]\s?\d\.\d?\s*,?$"
# Eight hundred bytes: a wide terminal's bar, whose blocks have three bytes each. A bar without an
# end, `129it [43:14, 20.11s/it, loss=0.16]`, is one of training where it shows a loss.
_BAR: _Signs = (
    (
        (b"%|",),
        rb"%\|[^\n\r]{0,800}?(\d{1,12})/(\d{1,12}) \[(?:\d+:)?\d\d:\d\d<[^\]\n\r]{0,40}"
        rb"(?:(?:it|step|batch|tok|tokens|sample|img)/s|s/(?:it|step|batch|sample))[^\]\n\r]{0,400}",
    ),
    (
        (b"it [",),
        rb"(?<![\d.])(\d{1,12})()it \[(?:\d+:)?\d\d:\d\d, +[\d.]+ ?(?:s/it|it/s)[^\]\n\r]{0,200}?"
        rb"loss=[^\]\n\r]{0,400}",
    ),
)
# Bars of work that is done before training, by the verbs they begin with.
_OTHER_BAR = (
    rb"[Ll]oad|[Dd]ownload|[Mm]ap|[Ff]ilter|[Tt]oken|[Ss]av|[Ff]etch|[Cc]aptur|[Cc]ompil|[Rr]esolv"
    rb"|[Gg]enerat|[Pp]rocess|[Rr]ead|[Ss]anity|[Cc]onvert|[Ee]xtract|[Pp]repar|[Qq]uantiz|[Mm]erg"
    rb"|[Pp]ack|[Ww]arm|[Ii]nit"
)
_END: _Signs = (
    (
        (b"training",),
        rb"(?i:(?<!after )(?<!until )(?<!when )(?<!once )(?<!the )(?<!for )(?<!if )"
        rb"(?:training (?:is |has )?(?:complete|finished|done)(?!d? \w+ing\b|: ?(?:false|none|0)\b)"
        rb"|finished training|end of training(?! is\b)))",
    ),
    # Megatron's, where its time or its steps are used up.
    ((b"exiting program a",), rb"exiting program (?:after [\d.]+ minutes|at iteration [1-9])"),
    ((b"trainoutput(",), rb"\bTrainOutput\(global_step=[1-9]"),
    ((b"trial ",), rb"(?i:trial \S+ completed after)"),
    # All workers of an agent of torchrun's have exited with 0.
    ((b"worker group successfully",), rb"\] worker group successfully finished\."),
    ((b"# avg bus bandwidth",), rb"# Avg bus bandwidth"),
    ((b"collective test concluded",), rb"Collective test concluded"),
    ((b"test passed",), rb"\btest passed\b"),
    ((b"... ",), rb"(?<=\.\.\. )(?:ok\s*$|passed\b)"),
    # The metrics that transformers' Trainer prints when the last evaluation is done.
    (
        (b"per_second", b"_runtime"),
        rb"\b(?:eval|predict|test)_(?:samples_per_second|steps_per_second|runtime)\s+=\s+\d",
    ),
    ((b" passed",), rb"={3,} \d+ passed[^\n]{0,60} in [\d.]+s"),
)
_INIT: _Signs = (
    ((b" complete",), rb"(?:Init|Destroy) COMPLETE"),
    ((b"connected all ",), rb"Connected all (?:rings|trees)"),
    ((b"connected nvls",), rb"Connected NVLS"),
    ((b"warmup completed",), rb"Warmup completed"),
    ((b"application startup complete",), rb"Application startup complete"),
    ((b"fired up and ready to roll",), rb"fired up and ready to roll"),
    ((b"uvicorn running on",), rb"Uvicorn running on"),
    ((b"running ",), rb"RUNNING +OK"),
    ((b"shard ready in ",), rb"Shard ready in \d"),
    ((b"text_generation_router: connected",), rb"text_generation_router: Connected"),
    ((b"torch.compile takes ",), rb"torch\.compile takes \d"),
    ((b"graph capturing finished",), rb"Graph capturing finished"),
    ((b"init engine ",), rb"init engine [^\n]{0,60}took"),
)
# NCCL says INFO only while it works; a failure among such lines is found by its signature.
_BEGUN: _Signs = (
    ((b"nccl info ",), rb"NCCL INFO "),
    ((b"] info ",), rb":\d{1,7} \[\d{1,2}\] INFO "),
    ((b"nccl version ",), rb"NCCL version \d"),
    ((b"coll channels",), rb"coll channels"),
    ((b"is connected to ",), rb"is connected to \d+ peer ranks"),
    ((b"setting up process group",), rb"Setting up process group for: env://"),
    ((b"started distributed worker",), rb"Started distributed worker processes"),
    ((b"rendezvous complete",), rb"Rendezvous complete for workers"),
    ((b"network check result",), rb"[Nn]etwork check result is True"),
    ((b"completed store-based",), rb"Completed store-based barrier"),
    # torch's store is reached, and serves.
    ((b"client socket has connected",), rb"The client socket has connected to "),
    ((b"has accepted a connection",), rb"The server socket on \S+ has accepted a connection from "),
    ((b" processes registered",), rb"All (?:distributed|DDP) processes registered"),
    ((b"initializing d",), rb"(?i:initializing (?:distributed|ddp): GLOBAL_RANK)"),
    ((b"distributed init (rank ",), rb"distributed init \(rank \d"),
    # A rank that has been told how many there are.
    (
        (b"rank",),
        rb"(?i:\brank[ :=]{1,2}\d{1,6},? ?(?:/|of|\(?world[ _]size) ?[:=]? ?(?:size )?\d)",
    ),
    ((b"net/ofi selected ",), rb"NET/OFI Selected [Pp]rovider is"),
    ((b"using network ",), rb"\bUsing network [A-Z]\w+"),
    ((b"initializing a",), rb"Initializing an? (?:V\d )?LLM engine"),
    ((b"initializing torchbackend",), rb"Initializing TorchBackend"),
    ((b"vllm is using nccl==",), rb"vLLM is using nccl=="),
    ((b"init torch distributed",), rb"Init torch distributed"),
    ((b"vllm api server version",), rb"vLLM API server version"),
    ((b"server_args=",), rb"\bserver_args=ServerArgs\("),
    ((b"world info dict: ",), rb"WORLD INFO DICT: "),
    ((b"[runner.py:",), rb"\[runner\.py:\d+:main\] (?:cmd = |Using IP address of )"),
    ((b"processgroupnccl initializ",), rb"ProcessGroupNCCL initializ(?:ed|ation)"),
    ((b"nccl watchdog thread started",), rb"NCCL watchdog thread started"),
    ((b"num_local_procs=",), rb"nnodes=\d{1,5}, num_local_procs="),
    ((b'"post /',), rb"\"POST /[^\"\n]{1,60} HTTP/1\.\d\" 200\b"),
    # Servers that load their model: vLLM, SGLang, TensorRT-LLM.
    (
        (b"ing took ", b"weights took "),
        rb"\b(?:[Ll]oading (?:model )?weights|Model loading) took [\d.]",
    ),
    ((b"load weight ",), rb"[Ll]oad weight (?:end\.|begin)"),
    ((b"starting to load model ",), rb"Starting to load model \S"),
    ((b"in world size ",), rb"in world size \d{1,6} is assigned as"),
    (
        (b"kv cache",),
        rb"(?:GPU KV cache size|Available KV cache memory): \d|KV Cache is allocated\. #tokens",
    ),
    ((b"load engine takes: ",), rb"Load engine takes: \d"),
    (
        (b"[tensorrt-llm][info] ",),
        rb"\[TensorRT-LLM\]\[INFO\] (?:MPI size: \d|Engine version \d|Initialized MPI"
        rb"|Rank \d{1,6} is using GPU|Loaded engine size: \d)",
    ),
    ((b"] [trt-llm] [i] ",), rb"\] \[TRT-LLM\] \[I\] (?:Set \w{1,60} to|Rank \d{1,6} uses) "),
    ((b"waiting for shard to be ready",), rb"Waiting for shard to be ready\.\.\."),
    # Triton's server takes its models in.
    ((b"model_lifecycle.cc:",), rb"\bmodel_lifecycle\.cc:\d{1,5}\] \"?(?:successfully )?load"),
    # The head of nccl-tests and rccl-tests, before their first row.
    ((b"# collective test starting",), rb"# Collective test starting"),
    ((b"# nthread ",), rb"# nThread \d+ nGpus \d+ minBytes"),
    # The coordination service of JAX and TensorFlow has its tasks.
    ((b"coordination service",), rb"has connected to coordination service"),
    ((b"coordination agent",), rb"[Cc]oordination agent has successfully connected"),
    ((b"connected to distributed jax",), rb"Connected to distributed JAX controller"),
    # TensorFlow finds the GPU's libraries; a replica of torchft's is in its quorum.
    ((b"opened dynamic library",), rb"Successfully opened dynamic library libcu"),
    ((b"finished quorum for ",), rb"Finished quorum for group_rank"),
    # Rows of other tests of latency and bandwidth: OSU's, UCX's, perftest's.
    ((b"# osu mpi",), rb"# OSU MPI"),
    ((b"msg_pow2,",), rb"msg_pow2,"),
    ((), rb"(?<=\n)\d+(?:[, \t]+\d+)?(?:[, \t]+\d+\.\d+){4,}[, \t]*\r?\n"),
    ((b"deepspeed info: version=",), rb"DeepSpeed info: version="),
    ((b"deepspeed basic optimizer",), rb"\bDeepSpeed Basic Optimizer = "),
    ((b" zero stage ",), rb"\w ZeRO stage \d optimizer\b"),
    # transformers reads a model; its datasets' bars are those of work that goes on.
    ((b">> loading ",), rb">> loading (?:weights|configuration) file "),
    ((b" examples/s]",), rb"%\|[^\n\r]{0,400}\d examples/s\]"),
    # The curves of what a run logged, as wandb draws them at its end, whichever that was.
    ((b"wandb: ",), rb"\bwandb: +[\w/@.-]+ (?:\xe2\x96[\x81-\x88]){2}"),
    # Lightning names its devices and ranks, and tries its validation first.
    ((b"gpu available: ",), rb"\bGPU available: (?:True|False)\b"),
    ((b"global_rank: ",), rb"Initializing distributed: GLOBAL_RANK: \d"),
    ((b"local_rank: ",), rb"\bLOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES: \["),
    ((b"sanity checking ",), rb"\bSanity Checking (?:DataLoader \d+)?: +\d+%"),
    # Trainers that say so before their first step.
    (
        (b"training start", b"training is start", b"training begins"),
        rb"[Tt]raining (?:starts|is starting|begins) (?:at|from|with) (?:step|epoch|iteration)",
    ),
)

WHOLE_BLOCK = 64 * 1024
# How much of a line before a mark is read: to tell where it begins, and whether it speaks of
# settings.
_LINE_REACH, _SETTING_REACH = 8 * 1024, 400
# A step that is the first again has gone back where the one before had this number: ranks that are
# not equally far are not that far apart.
_FAR = 10
_HEAD, _TAIL, _AROUND_HIT = 2 * 1024, 4 * 1024, 8 * 1024
# So many hits of a block that a stretch without one follows: the job may have run on there.
_GAPS = 2


class Marks(NamedTuple):
    """Offsets in a block: of each step mark found, and of the last of the rarer marks (or -1).

    ``last_is_bar``: whether the last of the steps is one that a progress bar shows. ``restart``:
    the last step with which the number of steps has gone back to the first.
    """

    steps: tuple[int, ...]
    init: int
    ended: int
    begun: bool
    last_is_bar: bool
    restart: int | None = None


@dataclass
class Progress:
    """How far a log has come: each progress bar, by its total, and the last number of a step."""

    bars: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def copy(self) -> Progress:
        return Progress(dict(self.bars), self.step)


class _Region(NamedTuple):
    """A part of a block that is read; ``lower`` is its text in lower case."""

    block: bytes
    start: int
    stop: int
    lower: bytes


NO_MARKS = Marks((), -1, -1, False, False)


def read_marks(block: bytes, hits: Sequence[tuple[int, int]], progress: Progress) -> Marks:
    """The signs in ``block`` that the job runs; ``hits``: the literals in it, by where they end.

    ``progress`` is brought up to date.
    """
    steps: list[int] = []
    drawn: dict[int, _Bar] = {}
    init, ended, begun = -1, -1, False
    for region in _regions(block, hits):
        bars_of_lines = dict(_bars(region))
        steps.extend(_steps(region, {line: bar.stop for line, bar in bars_of_lines.items()}))
        drawn.update((bar.start, bar) for bar in bars_of_lines.values() if bar.is_training)
        init = max(init, *_starts(_INIT, region), -1)
        ended = max(ended, *_starts(_END, region), -1)
        begun = begun or any(True for _ in _found(_BEGUN, region))
    bars = progress.bars
    moved = [offset for offset, bar in sorted(drawn.items()) if _moved(bars, bar.at, bar.total)]
    shown = (offset for offset in sorted([*steps, *moved]) if not _is_quoted(block, offset))
    kept = _one_a_line(block, shown)
    restarts = [offset for offset in kept if _goes_back(block, offset, progress)]
    last = restarts[-1] if restarts else None
    return Marks(kept, init, ended, begun, bool(kept) and kept[-1] in moved, last)


def _goes_back(block: bytes, offset: int, progress: Progress) -> bool:
    """Whether the step is the first one again, and not only that of a part of the run."""
    found = _compiled(_COUNTER).match(block, offset)
    if found is None:
        return False
    before, progress.step = progress.step, int(found[1])
    return (
        before >= _FAR
        and progress.step <= 1
        and not _compiled(_PART_OF_A_RUN).match(block, _line_start(block, offset))
    )


def _moved(bars: dict[int, int], at: int, total: int) -> bool:
    """Whether a bar was drawn further than before: a process that ends draws its bar once more."""
    before = bars.get(total, 0)
    # One that is far behind is a new bar, of the next epoch.
    if at > before or at < before / 2:
        bars[total] = at
    return at > before


def _is_quoted(block: bytes, offset: int) -> bool:
    """Whether the line is the program's own, as a traceback quotes it: `assert loss < 1.0`."""
    end = block.rfind(b"\n", 0, offset)
    before = block[block.rfind(b"\n", 0, max(end, 0)) + 1 : max(end, 0)]
    return b'File "' in before and b'", line ' in before


def _one_a_line(block: bytes, offsets: Iterable[int]) -> tuple[int, ...]:
    kept: list[int] = []
    for offset in offsets:
        if not kept or _line_start(block, offset) > kept[-1]:
            kept.append(offset)
    return tuple(kept)


_compiled = cache(re.compile)


def _found(signs: _Signs, region: _Region) -> Iterator[re.Match[bytes]]:
    for words, expression in signs:
        if not words or any(word in region.lower for word in words):
            yield from _compiled(expression).finditer(region.block, region.start, region.stop)


def _starts(signs: _Signs, region: _Region) -> Iterator[int]:
    return (found.start() for found in _found(signs, region))


def _steps(region: _Region, bars: Mapping[int, int]) -> Iterator[int]:
    """Where a line shows a step first; ``bars`` says up to where a line is its bar's."""
    block = region.block
    for signs in (_STEPS, _LOSS):
        shown = -1
        for begin in _starts(signs, region):
            line = _line_start(block, begin)
            if line <= shown or begin < bars.get(line, 0):
                continue
            before = block[max(line, begin - _SETTING_REACH) : begin]
            if _compiled(_SETTING).search(before) or _is_unchanged(block, line, begin):
                continue
            if signs is _STEPS:
                shows = not _compiled(_COUNT).search(before)
            else:
                named = _compiled(_LOSS_NAME).search(before)
                shows = bool(named) and not _compiled(_ROUND).match(
                    block[line : begin + 32].split(b"\n")[0]
                )
            if shows:
                shown = begin
                yield begin


def _is_unchanged(block: bytes, line: int, begin: int) -> bool:
    """Whether the number of a mark is 0 and its line that of a state without a step."""
    return bool(_compiled(_ZERO).match(block, begin) and _compiled(_UNCHANGED).match(block, line))


class _Bar(NamedTuple):
    """A drawing of a bar: where it begins and ends, how far it has come, and of how much."""

    start: int
    stop: int
    at: int
    total: int
    is_training: bool


def _bars(region: _Region) -> Iterator[tuple[int, _Bar]]:
    """Each drawing of a bar, with where its line begins."""
    block = region.block
    for found in _found(_BAR, region):
        line = _line_start(block, found.start())
        # With a loss, or with vLLM's speeds of the batch that it answers, a bar is the job's own.
        is_training = any(
            word in found[0] for word in (b"loss", b"est. speed input: ")
        ) or not _compiled(_OTHER_BAR).search(block, line, found.start())
        at, total = int(found[1]), int(found[2] or 0)
        yield line, _Bar(found.start(), found.end(), at, total, is_training)


def _line_start(block: bytes, offset: int) -> int:
    """Where the line begins, or where it is read from if that is farther away than is read."""
    first = max(0, offset - _LINE_REACH)
    line = max(block.rfind(b"\n", first, offset) + 1, first)
    return max(block.rfind(b"\r", line, offset) + 1, line)


def _regions(block: bytes, hits: Sequence[tuple[int, int]]) -> Iterator[_Region]:
    size = len(block)
    spans = [(0, size)]
    if size > WHOLE_BLOCK:
        spans = [(0, _HEAD), (size - _TAIL, size)]
        if hits:
            last = hits[-1][0]
            spans.append((max(0, last - _AROUND_HIT), last))
            spans += ((end, min(size, end + _AROUND_HIT)) for end in (last, *_before_gaps(hits)))
    return (_Region(block, start, stop, block[start:stop].lower()) for start, stop in spans)


def _before_gaps(hits: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Where the last hits are that much without one follows, the last of all left out."""
    later = reversed(hits)
    following = next(later)[0]
    found = 0
    for end, _ in later:
        if following - end > _AROUND_HIT:
            yield end
            found += 1
            if found == _GAPS:
                return
        following = end
