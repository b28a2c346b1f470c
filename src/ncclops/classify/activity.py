"""Signs that a job runs: training steps, a normal end, communicators that came up.

A log without a failure in it need not be healthy: something must show that the job ran.
Step lines are the bulk of any training log, so of a large block only its head, its tail and
what follows a failure are read; in between, one more step changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

# Each begins with a fixed run of characters, by which `re` skips through text that has none. A
# number with a percent sign is a bar's, which counts only where it has moved on.
_STEP = re.compile(
    rb"(?:(?<=[Ss])tep|(?<=[Ii])ter(?:ation)?|(?<=[Bb])atch)s?\W{0,8}\d+(?![\d%])[^\n\r]{0,300}?"
    rb"(?:_[Ll]oss|\b(?:[Ll]oss|tok|tokens|sec|it/s|ms|lr|learning rate|samples|grad|elapsed|mem"
    rb"|[Tt]flops?|TFLOPS?))"
)
_LOSS = re.compile(rb"oss'?\W{1,4}\d")
_LOSS_NAME = re.compile(rb"(?<![\w ])(?:train_|lm |total_|')?[Ll]$|(?<!val) [Ll]$")
# Eight hundred bytes: a wide terminal's bar, whose blocks have three bytes each.
_BAR = re.compile(
    rb"%\|[^\n\r]{0,800}?(\d{1,12})/(\d{1,12}) \[\d\d:\d\d(?::\d\d)?<[^\]\n\r]{0,40}(?:it/s|s/it)"
)
# A row of nccl-tests: bytes, elements, type, operation and root (not of all), time, bandwidths.
_TEST_ROW = re.compile(
    rb" \d+ +\d+ +(?:u?int\d+|float|double|half|bfloat16|f8e\dm\d) +(?:\w+ +){0,2}?(?:-?\d+ +)?"
    rb"\d+\.?\d* +\d+\.\d+"
)
# A bar without an end, `129it [43:14, 20.11s/it, loss=0.16]`: a step where it shows a loss.
_OPEN_BAR = re.compile(rb"it \[\d\d:\d\d(?::\d\d)?, +[\d.]+ ?(?:s/it|it/s)[^\]\n\r]{0,200}?loss=")
# What DeepEP's and other tests of bandwidth print of each size.
_TUNING = re.compile(rb"\[tuning\][^\n]{0,120}?\d GB/s")
# Bars of Keras: `5/5 [====] - 4s 60ms/step - loss: 2.3`.
_KERAS = re.compile(rb"\d/\d{1,12} (?:\[[=>.]{3,}\]|\xe2\x94\x81)[^\n\r]{0,120}/step\b")
# What vLLM and SGLang print as long as they answer.
_SERVED = re.compile(
    rb"Avg prompt throughput: |Decode batch[^\n]{0,200}throughput|, Generated text: "
    rb"|\"POST /(?:v1/|generate)[^\"\n]{0,60} HTTP/1\.\d\" 200\b"
)
# Composer's losses on lines of their own, what Ray Train reports of a trial, verl's metrics, an
# epoch's accuracy.
_REPORTED = re.compile(
    rb"(?:rain loss/\S{1,40}: |finished iteration )\d|step:\d{1,9} - \w+/"
    rb"|\bEpoch\W{1,4}\d{1,6}\W{1,4}(?i:train |valid\w* |test )?(?i:acc\w*)\W{1,3}\d"
)
# Bars of work that is done before training, by the verbs they begin with.
_OTHER_BAR = re.compile(
    rb"[Ll]oad|[Dd]ownload|[Mm]ap|[Ff]ilter|[Tt]oken|[Ss]av|[Ff]etch|[Cc]aptur|[Cc]ompil|[Rr]esolv"
    rb"|[Gg]enerat|[Pp]rocess|[Rr]ead"
)
_END = re.compile(
    rb"(?i:training (?:is )?(?:complete|finished|done)|finished training|end of training"
    rb"|trial \S+ completed after)"
    rb"|# Avg bus bandwidth|Collective test concluded|\btest passed\b"
    rb"|(?<=\.\.\. )(?:ok\s*$|passed\b)"
    # The metrics that transformers' Trainer prints when the last evaluation is done.
    rb"|\b(?:eval|predict|test)_(?:samples_per_second|steps_per_second|runtime)\s+=\s+\d"
    rb"|={3,} \d+ passed[^\n]{0,60} in [\d.]+s"
)
_INIT = re.compile(
    rb"Init COMPLETE|Connected all (?:rings|trees)|Connected NVLS|Destroy COMPLETE"
    rb"|Warmup completed|Application startup complete|fired up and ready to roll"
    rb"|Uvicorn running on|RUNNING +OK|Shard ready in \d|text_generation_router: Connected"
    rb"|torch\.compile takes \d|Graph capturing finished|init engine [^\n]{0,60}took"
)
# NCCL says INFO only while it works; a failure among such lines is found by its signature.
_INIT_BEGUN = re.compile(
    rb"NCCL INFO |:\d{1,7} \[\d{1,2}\] INFO |NCCL version \d|coll channels"
    rb"|is connected to \d+ peer ranks"
    rb"|Setting up process group for: env://|Started distributed worker processes"
    rb"|Rendezvous complete for workers|[Nn]etwork check result is True"
    rb"|Completed store-based barrier|All (?:distributed|DDP) processes registered"
    rb"|(?i:initializing (?:distributed|ddp): GLOBAL_RANK)|distributed init \(rank \d"
    # A rank that has been told how many there are.
    rb"|(?i:\brank[ :=]{1,2}\d{1,6},? ?(?:/|of|\(?world[ _]size) ?[:=]? ?(?:size )?\d)"
    rb"|NET/OFI Selected [Pp]rovider is|\bUsing network [A-Z]\w+"
    rb"|Initializing an? (?:V\d )?LLM engine|Initializing TorchBackend|vLLM is using nccl=="
    rb"|Init torch distributed|vLLM API server version|\bserver_args=ServerArgs\(|WORLD INFO DICT: "
    rb"|ProcessGroupNCCL initializ(?:ed|ation)|NCCL watchdog thread started"
    rb"|nnodes=\d{1,5}, num_local_procs=|\"POST /[^\"\n]{1,60} HTTP/1\.\d\" 200\b"
    # Servers that load their model: vLLM, SGLang, TensorRT-LLM.
    rb"|\b(?:[Ll]oading (?:model )?weights|Model loading) took [\d.]|Load weight end\."
    rb"|Starting to load model \S|in world size \d{1,6} is assigned as"
    rb"|(?:GPU KV cache size|Available KV cache memory): \d|Load weight begin"
    rb"|KV Cache is allocated\. #tokens|Load engine takes: \d|\[TensorRT-LLM\]\[INFO\] MPI size: \d"
    # The head of nccl-tests and rccl-tests, before their first row.
    rb"|# (?:Collective test starting|nThread \d+ nGpus \d+ minBytes)"
    # The coordination service of JAX and TensorFlow has its tasks.
    rb"|has connected to coordination service|[Cc]oordination agent has successfully connected"
    rb"|Connected to distributed JAX controller"
    # TensorFlow finds the GPU's libraries; a replica of torchft's is in its quorum.
    rb"|Successfully opened dynamic library libcu|Finished quorum for group_rank"
    # Rows of other tests of latency and bandwidth: OSU's, UCX's, perftest's.
    rb"|# OSU MPI|msg_pow2,|(?<=\n)\d+(?:[, \t]+\d+)?(?:[, \t]+\d+\.\d+){4,}[, \t]*\r?\n"
    rb"|DeepSpeed info: version=|\bDeepSpeed Basic Optimizer = |\w ZeRO stage \d optimizer\b"
    # Trainers that say so before their first step.
    rb"|[Tt]raining (?:starts|is starting|begins) (?:at|from|with) (?:step|epoch|iteration)"
)

_LINE_END = re.compile(rb"[\n\r]")

WHOLE_BLOCK = 64 * 1024
_HEAD, _TAIL, _AROUND_HIT = 2 * 1024, 4 * 1024, 8 * 1024


class Marks(Struct, frozen=True):
    """Offsets in a block: of each step mark found, and of the last of the rarer marks (or -1).

    ``last_is_bar``: whether the last of the steps is one that a progress bar shows.
    """

    steps: tuple[int, ...]
    init: int
    ended: int
    begun: bool
    last_is_bar: bool


NO_MARKS = Marks((), -1, -1, False, False)


def read_marks(block: bytes, last_hit: int, bars: dict[int, int]) -> Marks:
    """The signs in ``block`` that the job runs; ``last_hit``: where its last literal is, or -1.

    ``bars`` holds how far each progress bar has come, by its total, and is brought up to date.
    """
    steps: list[int] = []
    drawn: dict[int, tuple[int, int]] = {}
    init, ended, begun = -1, -1, False
    for start, stop in _regions(len(block), last_hit):
        steps.extend(_steps(block, start, stop))
        drawn.update(_bars(block, start, stop))
        init = max(init, *(found.start() for found in _INIT.finditer(block, start, stop)), -1)
        ended = max(ended, *(found.start() for found in _END.finditer(block, start, stop)), -1)
        begun = begun or _INIT_BEGUN.search(block, start, stop) is not None
    moved = [offset for offset, (at, total) in sorted(drawn.items()) if _moved(bars, at, total)]
    shown = (offset for offset in sorted([*steps, *moved]) if not _is_quoted(block, offset))
    kept = _one_a_line(block, shown)
    return Marks(kept, init, ended, begun, bool(kept) and kept[-1] in moved)


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
        if not kept or _LINE_END.search(block, kept[-1], offset):
            kept.append(offset)
    return tuple(kept)


def _steps(block: bytes, start: int, stop: int) -> Iterator[int]:
    for found in _STEP.finditer(block, start, stop):
        yield found.start()
    for found in _LOSS.finditer(block, start, stop):
        if _LOSS_NAME.search(block[max(0, found.start() - 8) : found.start()]):
            yield found.start()
    for rows in (_TEST_ROW, _SERVED, _KERAS, _TUNING, _REPORTED, _OPEN_BAR):
        for found in rows.finditer(block, start, stop):
            yield found.start()


def _bars(block: bytes, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(offset, (position, total)) of each drawing of a bar of training."""
    for found in _BAR.finditer(block, start, stop):
        line_start = max(block.rfind(b"\n", 0, found.start()), block.rfind(b"\r", 0, found.start()))
        if not _OTHER_BAR.search(block, line_start + 1, found.start()):
            yield found.start(), (int(found[1]), int(found[2]))


def _regions(size: int, last_hit: int) -> list[tuple[int, int]]:
    if size <= WHOLE_BLOCK:
        return [(0, size)]
    regions = [(0, _HEAD), (size - _TAIL, size)]
    if last_hit >= 0:
        regions.append((last_hit, min(size, last_hit + _AROUND_HIT)))
        regions.append((max(0, last_hit - _AROUND_HIT), last_hit))
    return regions
