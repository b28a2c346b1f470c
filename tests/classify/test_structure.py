"""What is read from the shape of a log, and not from one line: clocks, files, bars, operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.classify import Report, Scanner, classify_bytes, classify_paths
from tests.classify.shipped import LOADED


def classify(text: str) -> Report:
    return classify_bytes(text.encode(), LOADED)


def watchdog(rank: int, minute: int) -> str:
    return (
        f"[rank{rank}]:[E606 09:{minute:02d}:00.164985344 ProcessGroupNCCL.cpp:757] [Rank {rank}] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 milliseconds before timing out."
    )


def timed_out(rank: int, operation: str, group: str = "0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E606 09:09:08.1 ProcessGroupNCCL.cpp:629] [PG ID 0 PG GUID {group} Rank "
        f"{rank}] Watchdog caught collective operation timeout: WorkNCCL({operation}, NumelOut=4, "
        "Timeout(ms)=600000) ran for 600004 milliseconds before timing out."
    )


@pytest.mark.parametrize(
    ("other", "class_"),
    [
        (timed_out(1, "SeqNum=9, OpType=BROADCAST, NumelIn=4"), "collective-mismatch"),
        (timed_out(1, "SeqNum=9, OpType=ALLREDUCE, NumelIn=8"), "collective-mismatch"),
        (timed_out(1, "SeqNum=9, OpType=ALLREDUCE, NumelIn=4"), "watchdog-timeout"),
        (timed_out(1, "SeqNum=8, OpType=BROADCAST, NumelIn=4"), "watchdog-timeout"),
        (timed_out(1, "SeqNum=9, OpType=BROADCAST, NumelIn=4", group="7"), "watchdog-timeout"),
    ],
)
def test_operations_of_time_outs_are_compared(other: str, class_: str) -> None:
    log = f"{timed_out(0, 'SeqNum=9, OpType=ALLREDUCE, NumelIn=4')}\n{other}\n"
    verdict = classify_bytes(log.encode(), LOADED).verdict
    assert (verdict.class_, verdict.retry_policy) == (class_, "fix-code")


def test_a_time_out_by_a_clock_that_is_ahead_does_not_lead(tmp_path: Path) -> None:
    logs = {rank: watchdog(rank, 9) for rank in range(4)}
    logs[2] = "2026-06-06 09:10:00,001 ERROR ValueError: bad sample in shard 9"
    for rank, line in logs.items():
        (tmp_path / f"rank_{rank}.log").write_text(f"{line}\n")
    verdict = classify_paths([tmp_path], LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("user-error", 2)


@pytest.mark.parametrize(("named", "rank"), [("rank_{}.log", 5), ("node_rank_{}.log", 1)])
def test_a_file_is_of_the_rank_it_is_named_for_unless_lines_contradict(
    tmp_path: Path, named: str, rank: int
) -> None:
    """A line copied from elsewhere names another rank; so do all lines of a node's log."""
    of_nodes = named.startswith("node")
    for number in range(8):
        writer = number * 8 + 1 if of_nodes else number
        (tmp_path / named.format(number)).write_text(f"{watchdog(writer, 20)}\n")
    blamed = 0 if of_nodes else 5
    cause = "[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered"
    (tmp_path / named.format(blamed)).write_text(f"{cause}\n")
    verdict = classify_paths([tmp_path], LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("cuda-error", rank)


BAR = "\r 30%|###       | 3/10 [00:01<00:03,  2.10it/s]"


def test_a_bar_that_is_drawn_again_is_no_progress() -> None:
    """What a plain torchrun prints: rank 1 fails, and rank 0 closes its bar."""
    bars = "".join(f"\r {n}0%|##    | {n}/10 [00:0{n}<00:09,  1.10it/s]" for n in range(4))
    failure = "\n[rank1]: AssertionError: loss is too large\n"
    end = "\nE0606 torch/distributed/elastic: failed (exitcode: 1) local_rank: 1 (pid: 7)"
    verdict = classify_bytes(f"{bars}{failure}{BAR}{end}\n".encode(), LOADED).verdict
    assert (verdict.class_, verdict.rank) == ("user-error", 1)
    moved = BAR.replace("3/10", "5/10") + BAR.replace("3/10", "6/10")
    verdict = classify_bytes(f"{bars}{failure}{moved}\n".encode(), LOADED).verdict
    assert verdict.class_ == "no-failure-seen"


def test_an_unknown_failure_has_three_candidates_and_what_would_decide() -> None:
    log = b"the job hung for an hour\nno response, still stuck\nit hung until the end\n"
    report = classify_bytes(log, LOADED)
    assert report.verdict.class_ == "unknown"
    classes = [candidate.class_ for candidate in report.candidates]
    assert len(classes) == 3 and classes[0] == "watchdog-timeout"
    assert all(entry["decide"] for entry in report.as_json()["candidates"])
    assert classify_bytes(b"step 1 loss 2.0\nstep 2 loss 1.9\n", LOADED).candidates == ()


def test_an_error_that_the_watchdog_finds_is_of_a_communicator_that_had_been_made() -> None:
    """Whatever traces of the start stand around it, and although the first collective was next."""
    lines = [
        "n1:10:44 [3] NCCL INFO bootstrap.cc:670 -> 6",
        "[rank1]:[E606 09:09:08.1 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0 Rank 1] Process "
        "group watchdog thread terminated with exception: NCCL error: remote process exited or "
        "there was a network error, NCCL version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process",
    ]
    scanner = Scanner(LOADED)
    scanner.feed(1, "stderr", ("\n".join(lines) + "\n").encode())
    for starting_up in (True, False, None):
        verdict = scanner.verdict(starting_up=starting_up).verdict
        assert (verdict.class_, verdict.retry_policy) == ("peer-exit", "none")


IFNAME = "n1:9:9 [2] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth9"
NO_INTERFACE = "Bootstrap : no socket interface found"
COLLECTED = {
    "json": '{{"log":"{}\\n","stream":"stderr","time":"2026-10-01T10:00:00Z"}}',
    "syslog": "Nov 01 10:00:07 gpu-07 python[3122]: {}",
    "logger": "2026-10-01 10:00:07.123 UTC | worker-0 | ERROR | {}",
    "sagemaker": "[1,mpirank:3,algo-1]<stderr>:{}",
    "quoted": "> {}",
}


@pytest.mark.parametrize("form", COLLECTED.values(), ids=COLLECTED)
def test_lines_are_read_as_their_author_wrote_them_whoever_collected_them(form: str) -> None:
    """Both need the line's begin: the message below ``Last error:``, and a frame of a stack."""
    last = [IFNAME, "ncclInternalError: Internal check failed.", "Last error:", NO_INTERFACE]
    report = classify("\n".join(map(form.format, last)))
    assert (report.verdict.class_, report.verdict.signature) == (
        "plugin-env",
        "socket-ifname-wrong",
    )
    frame = " 1 0x0000000000011bd1 ncclTunerInit()  /opt/lib/libnccl-ofi-tuner.so:0"
    stack = "\n".join(map(form.format, ["Signal: Segmentation fault (11)", frame]))
    assert classify(stack).verdict.signature == "crash-in-plugin"


def test_entities_of_a_web_page_are_read_as_what_they_stand_for() -> None:
    text = "n1:9:9 [2] NCCL INFO transport/nvls.cc:330 -&gt; 1\nncclUnhandledCudaError: failed"
    assert classify(text).verdict.class_ == "nvls-multicast"


@pytest.mark.parametrize("before", ["n1:9:9 [0] NCCL INFO Channel 0", "[rank0]: UserWarning: old"])
def test_a_rank_that_writes_into_the_line_of_another_process_is_heard(before: str) -> None:
    failure = "[rank3]: RuntimeError: Backend nccl does not support allgather_into_tensor_coalesced"
    report = classify(before + failure)
    assert (report.verdict.class_, report.verdict.rank) == ("coalesced-unsupported", 3)


def test_a_bar_that_is_named_for_steps_counts_as_a_bar() -> None:
    """The bar of a process that ends is drawn at 0 %, on the line of the launcher's summary."""
    bar = "steps:   0%|          | 0/186 [00:00<?, ?it/s]"
    log = f"KeyError: 'mask'\n{bar}ERROR:api:failed (exitcode: 1) local_rank: 0 (pid: 7)\n"
    assert classify(log).verdict.signature == "python-exception"
    moved = f"{bar}\rsteps:   1%|          | 2/186 [00:09<13:09, 4.29s/it]\n"
    assert classify(moved).verdict.class_ == "no-failure-seen"


@pytest.mark.parametrize(
    "bar",
    [
        " 10%|█         | 100/1000 [00:10<01:30, 10.0it/s, loss=2.3, v_num=0]",
        "loss 2.31:  10%|█         | 100/1000 [00:10<01:30, 10.0batch/s]",
        "129it [43:14, 20.11s/it, loss=0.16]",
    ],
)
def test_a_bar_that_shows_a_loss_is_a_bar(bar: str) -> None:
    """A process that ends draws its bar once more, with all that it shows."""
    log = f"{bar}\nKeyError: 'mask'\n{bar}\n{bar}\n"
    assert classify(log).verdict.signature == "python-exception"
    assert classify(f"{bar}\n").verdict.class_ == "no-failure-seen"


@pytest.mark.parametrize(
    "text",
    [
        "srun torchrun train.py --steps 1000 --lr 0.1 --loss 0.5",
        "Namespace(lr=0.1, betas=(0.9, 0.95), loss=0.1, steps=1000, tok='gpt2')",
        "Training config: max_steps=1000, loss='mse', eval_steps: 500, batch size 32 lr 0.01",
        "model:\n  name: gpt2\ntraining:\n  loss: 0.0\n  lr: 0.0003",
        "  0%|          | 0/1000 [00:00<?, ?it/s, loss=0.00]",
        "Sanity Checking: 100%|██████████| 2/2 [00:00<00:00, 10.0it/s]",
        "Training finished loading data",
        "the model is saved after training is complete",
        "Training done: False",
        "8 packets transmitted, packet loss: 0.0%",
    ],
)
def test_settings_promises_and_preparation_are_no_progress(text: str) -> None:
    assert classify(f"{text}\n").verdict.class_ == "unknown"


def test_the_bar_of_a_wide_terminal_is_a_bar() -> None:
    wide = "".join(f"\r{n}0%|{'█' * 20 * n:200}| {n}/10 [00:0{n}<00:09,  1.10it/s]" for n in (8, 9))
    assert classify(f"{wide}\n").verdict.class_ == "no-failure-seen"


def test_metrics_with_prefixes_are_steps() -> None:
    for line in ("step:3 - actor/kl_loss:0.001 - actor/lr:1e-6", "step 4, policy_loss=0.2"):
        assert classify(f"(TaskRunner pid=7) {line}\n").verdict.class_ == "no-failure-seen"


def test_a_traceback_that_ends_in_a_lost_worker_is_no_failure_of_the_program() -> None:
    frame = '  File "/work/rollout/server.py", line 63, in sleep\n    await one()\n'
    lost = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    assert classify(frame).verdict.class_ == "user-error"
    assert classify(f"{frame}{lost}\n").verdict.class_ == "peer-exit"


PREPARING = "Dropping Long Sequences:  92%|9  | 328986/359152 [29:58<12:05, 41.59 examples/s]"
WAITED = (
    "[rank1]:[W516 14:34:56.8 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=79, "
    "addr=[n0]:41170, remote=[n0]:29500) timed out after 1800000ms"
)


@pytest.mark.parametrize(
    ("before", "class_"), [(PREPARING, "watchdog-compile"), ("loading", "store-rendezvous")]
)
def test_ranks_that_wait_in_the_store_while_one_prepares_the_data(before: str, class_: str) -> None:
    # A bar that is still drawn and the other rank's error share a line.
    for between in ("\n", ""):
        assert classify(f"{before}{between}{WAITED}\n").verdict.class_ == class_


@pytest.mark.parametrize(
    "line",
    [
        "[INFO] [default] Rendezvous complete for workers. Result:",
        "trainer - INFO - Training starts at step 7.",
        "(Worker_TP3 pid=7) INFO 01-02 10:00:00 [runner.py:7] Starting to load model m/m-8b...",
        "INFO 01-02 10:00:00 [state.py:7] rank 3 in world size 8 is assigned as DP rank 0",
        "2026-01-02 10:00:00 | INFO | model_runner | Rank 1: load weight begin.",
        "[INFO|modeling_utils.py:7] 2026-01-02 10:00:00,7 >> loading weights file /m/model.st",
        "Running tokenizer:  84%|####  | 84/100 [00:02<00:00, 1890.14 examples/s] [repeated 3x]",
    ],
)
def test_a_start_shows_life_and_an_exception_that_nothing_knows_takes_it_away(line: str) -> None:
    verdict = classify(line + "\n").verdict
    assert (verdict.class_, verdict.confidence) == ("no-failure-seen", 0.6)
    assert classify(f"{line}\nwidget.WidgetError: no NCCL\n").verdict.shows_failure


def test_a_name_that_does_not_resolve_is_the_stores_unless_a_client_of_http_asked() -> None:
    unresolved = "socket.gaierror: [Errno -3] Temporary failure in name resolution\n"
    assert classify(unresolved).verdict.class_ == "store-rendezvous"
    frame = (
        '  File "/opt/lib/python3.12/site-packages/urllib3/connection.py", line 203, in _new_conn'
    )
    assert classify(f"{frame}\n{unresolved}").verdict.class_ == "user-error"


def test_frames_of_torch_are_the_launchers_on_windows_too() -> None:
    failed = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    frame = 'site-packages/torch/distributed/run.py", line 905, in main'
    for path in (f"/opt/lib/{frame}", f"D:/lib/{frame}".replace("/", "\\")):
        assert classify(f'  File "{path}\n{failed}').verdict.class_ == "peer-exit"


def test_a_bar_without_an_end_is_a_step_where_it_shows_a_loss() -> None:
    bar = "Epoch 0: : 129it [43:14, 20.11s/it, v_num=0, train_loss=0.162]\n"
    assert classify(bar).verdict.confidence > 0.6
    read = "Reading shards: 129it [43:14, 20.11s/it]\n"
    assert classify(read).verdict.class_ == "unknown"


def test_workers_that_set_up_a_group_show_life() -> None:
    line = "(RayTrainWorker pid=3, ip=10.0.0.2) Setting up process group for: env:// [rank=0]\n"
    assert classify(line).verdict.class_ == "no-failure-seen"


def test_an_abort_says_more_than_the_launcher_that_saw_a_process_end() -> None:
    ended = (
        "Primary job  terminated normally, but 1 process returned\n"
        "a non-zero exit code. Per user-direction, the job has been aborted.\n"
    )
    signal = (
        "mpiexec noticed that process rank 0 with PID 0 on node n1 exited on signal 6 (Aborted)."
    )
    assert classify(ended).verdict.class_ == "peer-exit"
    assert classify(f"{ended}{signal}\n").verdict.class_ == "process-crash"


OPEN_BAR = (
    "  4%|▍         | 2/50 [00:03<01:10,  1.46s/it]\r  6%|▌         | 3/50 [00:04<01:08,  1.46s/it]"
)


@pytest.mark.parametrize("end", ["", "\n", "\n}"])
@pytest.mark.parametrize(
    ("words", "class_"),
    [
        ("Killed", "host-oom"),
        ("Terminated", "preempted"),
        ("Hangup", "preempted"),
        ("User defined signal 1", "preempted"),
        ("KeyboardInterrupt", "preempted"),
    ],
)
def test_what_stands_behind_a_bar_is_read_as_a_line(words: str, class_: str, end: str) -> None:
    """tqdm leaves its line open, and a shell says there how the program ended."""
    for before in (OPEN_BAR, "loading: " + OPEN_BAR, "[rank0]: " + OPEN_BAR, OPEN_BAR + "\n"):
        assert classify(f"{before}{words}{end}").verdict.class_ == class_
    assert classify(f"{OPEN_BAR}\n").verdict.class_ == "no-failure-seen"


def test_a_bar_that_goes_on_behind_a_bracket_is_no_report_of_a_shell() -> None:
    assert classify(f"{OPEN_BAR}Killed old workers: 3\n").verdict.class_ == "no-failure-seen"


SHELL = [
    "CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'.",
    "Lmod has detected the following error: These module(s) or extension(s) exist",
    "run.sh: line 7: module: command not found",
]


@pytest.mark.parametrize("line", SHELL)
def test_an_environment_that_was_not_loaded_stands_behind_what_the_job_says(line: str) -> None:
    limit = (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T10:00:00 DUE TO TIME LIMIT ***"
    )
    assert classify(f"{line}\n").verdict.signature == "shell-not-set-up"
    assert classify(f"{line}\n{limit}\n").verdict.signature == "slurm-time-limit"
    assert classify(f"{line}\nKeyError: 'lr'\n").verdict.signature == "python-exception"
    assert classify(f"{line}\n{OPEN_BAR}\n").verdict.class_ == "no-failure-seen"
    assert classify(f"{line}\nn1:7:7 [0] NCCL INFO comm 0x7 Init COMPLETE\n").verdict.exit_code == 0


def answers(path: str, count: int = 3) -> str:
    line = 'INFO:     10.0.0.7:{} - "POST {} HTTP/1.1" 200 OK\n'
    return "".join(line.format(4000 + number, path) for number in range(count))


def test_a_server_that_answers_has_got_over_the_failure_of_an_earlier_start() -> None:
    failed = "OSError: m does not appear to have a file named config.json.\n"
    up = "INFO:     Application startup complete.\n"
    for path in ("/act", "/v1/completions", "/generate", "/predict?n=1"):
        assert classify(failed + up + answers(path)).verdict.class_ == "no-failure-seen"
    for path in ("/health", "/reset_prefix_cache", "/v1/load_lora_adapter"):
        assert classify(failed + up + answers(path)).verdict.class_ == "user-error"


def test_steps_between_two_failures_of_a_large_log_count() -> None:
    """Of a large block not all is read: what follows a hit is, and more hits may come."""
    failed = "OSError: m does not appear to have a file named config.json.\n"
    filler = "[DEBUG] xs=-2, ys=0.32\n" * 4000
    ended = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T10:00:00 ***\n"
    log = failed + answers("/act", 200) + filler + ended
    assert len(log) > 64 * 1024
    assert classify(log).verdict.signature == "slurm-cancelled"
    assert classify(failed + filler + ended).verdict.signature == "python-exception"


STARTED = "NCCL version 2.21.5+cuda12.4"
STEPS = "step 1 loss 3.1\nstep 2 loss 3.0"
NO_MEMORY = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GAVE_UP = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode  : 1"
CANCELLED = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T12:00:00 DUE TO TIME LIMIT ***"
)
REFUSED = (
    "n1:10:10 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45678> "
    "failed : Connection refused"
)
LAST, BOTH = "the verdict is on the last", "the verdict is on it and the one before"


@pytest.mark.parametrize(
    ("runs", "class_", "said"),
    [
        ([NO_MEMORY, GAVE_UP, STARTED, STEPS], "no-failure-seen", LAST),
        ([STEPS, NO_MEMORY, GAVE_UP, STARTED], "gpu-oom", BOTH),
        ([STEPS, CANCELLED, STARTED, STEPS, "KeyError: 'mask'"], "user-error", LAST),
        ([NO_MEMORY, GAVE_UP, STARTED, STEPS, CANCELLED], "preempted", LAST),
        ([STEPS, "Training complete", STARTED, NO_MEMORY], "gpu-oom", LAST),
        ([STEPS, "Training complete", STARTED], "no-failure-seen", LAST),
        # Whether this is another run, nobody says; that it took steps is enough.
        ([NO_MEMORY, STARTED, STEPS], "no-failure-seen", None),
        (["KeyError: 'mask'", STEPS, "Training complete"], "no-failure-seen", None),
        ([STEPS, "Training complete", "KeyError: 'mask'"], "user-error", None),
    ],
)
def test_the_last_run_in_a_file_decides(runs: list[str], class_: str, said: str | None) -> None:
    """A file that was appended to: two attempts of a batch job, say."""
    report = classify("\n".join(runs) + "\n")
    assert report.verdict.class_ == class_
    assert [note.split(", ")[-1].split("; ")[-1] for note in report.notes] == (
        [said] if said else []
    )


ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"


def counted(stop: int, name: str = "step", start: int = 0) -> str:
    return "\n".join(f"{name} {n} loss {9 - n / 99:.3f}" for n in range(start, stop))


@pytest.mark.parametrize(
    ("runs", "class_"),
    [
        ([counted(40), ILLEGAL, counted(4)], "no-failure-seen"),
        ([counted(40), ILLEGAL, GAVE_UP, counted(4)], "no-failure-seen"),
        ([counted(40), ILLEGAL, counted(4), "KeyError: 'mask'"], "user-error"),
        # The counter has not gone back, or was not far enough for it to be another rank's.
        ([counted(40), ILLEGAL, counted(44, start=40)], "cuda-error"),
        ([counted(4), ILLEGAL, counted(4)], "cuda-error"),
        # One step a rank may take without the one that failed.
        ([counted(40), ILLEGAL, GAVE_UP, counted(1)], "cuda-error"),
        # A part of the run that goes on on other ranks.
        ([counted(40), ILLEGAL, counted(4, "eval step")], "cuda-error"),
        ([counted(40), ILLEGAL, counted(4, "epoch 2 step")], "cuda-error"),
        ([counted(40), ILLEGAL, counted(4, "batch")], "cuda-error"),
    ],
)
def test_a_counter_that_goes_back_to_the_first_step_begins_a_run(
    runs: list[str], class_: str
) -> None:
    """A script's output that was appended to, without a launcher that says that a run begins."""
    assert classify("\n".join(runs) + "\n").verdict.class_ == class_


def test_a_counter_that_goes_back_is_seen_however_the_output_is_cut() -> None:
    log = "\n".join([counted(40), ILLEGAL, counted(4), ""]).encode()
    scanner = Scanner()
    for at in range(0, len(log), 7):
        scanner.feed(None, "log", log[at : at + 7])
        scanner.verdict()
    assert scanner.verdict().verdict.class_ == "no-failure-seen"


@pytest.mark.parametrize(
    ("row", "class_"),
    [
        (
            "[  2]  520 || B: 3.451 | C: 2.964 | T: 12.031 || ETA: 2 days, 4:31:22 || timer: 1.4",
            "no",
        ),
        ("[40/900] box: 0.051, cls: 1.28e-01, eta: 0:14:09", "no"),
        ("fetch model.bin: 34.5 MB/s, ETA: 0:14:09", "unknown"),
        ("convert shard 7: 3.1 MB/s, 2.0 GB done, eta 0:14:09", "unknown"),
    ],
)
def test_a_row_of_figures_with_the_time_that_is_left_is_a_step(row: str, class_: str) -> None:
    expected = "no-failure-seen" if class_ == "no" else "unknown"
    assert classify(f"{row}\n").verdict.class_ == expected


@pytest.mark.parametrize(
    "state",
    [
        '{"step": 0, "loss": 0.0}',
        '{"loss": 0.0, "epoch": 0, "step": 0}',
        '{"global_step": 0, "best_loss": null}',
        "TrainerState(step=0, loss=0.0, lr=1e-4)",
    ],
)
def test_a_state_that_no_step_has_changed_is_no_step(state: str) -> None:
    assert classify(state * 2 + "\n" + state).verdict.class_ == "unknown"


@pytest.mark.parametrize(
    "line", ['{"step": 12, "loss": 0.0}', '{"step": 0, "loss": 10.9}', "step 0 loss: 0.02"]
)
def test_a_step_with_a_number_or_a_loss_counts(line: str) -> None:
    assert classify(line).verdict.class_ == "no-failure-seen"


def test_a_run_that_may_be_of_a_late_host_makes_nothing_eligible() -> None:
    """Refused connections alone would be retried once; memory that ran out before is not."""
    report = classify("\n".join([STEPS, NO_MEMORY, GAVE_UP, STARTED, REFUSED]))
    assert (report.verdict.class_, report.verdict.eligible) == ("gpu-oom", False)
    assert BOTH in report.notes[-1]


def test_steps_of_an_earlier_run_are_no_progress_of_the_last() -> None:
    """Retries that are exceeded are worth another node only once collectives had completed."""
    lost = (
        "n1:10:10 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB: Got completion from peer "
        "10.0.0.2<4567> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
    )
    again = classify("\n".join([STEPS, "Training complete", STARTED, lost]))
    assert (again.verdict.class_, again.verdict.retry_policy) == ("network-transport", "fix-config")
    assert classify(f"{STEPS}\n{lost}").verdict.retry_policy == "replace-node"


@pytest.mark.parametrize("last", [GAVE_UP, "srun: error: n1: task 0: Exited with exit code 1"])
def test_a_worker_that_failed_after_the_training_s_end_has_failed(last: str) -> None:
    assert classify(f"{STEPS}\nTraining complete\n{last}\n").verdict.class_ == "peer-exit"


def test_an_attempt_that_failed_is_a_failure_until_the_next_takes_steps() -> None:
    again = "[default] Worker group FAILED. 2/3 attempts left; will restart worker group"
    assert classify(f"{again}\n  restart_count=1\n").verdict.class_ == "peer-exit"
    assert classify(f"{again}\n  restart_count=1\n{STEPS}\n").verdict.class_ == "no-failure-seen"


def test_what_an_agent_of_torchrun_says_of_its_workers_end() -> None:
    agent = "I0410 08:56:49.493000 7 torch/distributed/elastic/agent/server/api.py:877] [default] "
    done = f"{agent}worker group successfully finished. Waiting 300 seconds for other agents\n"
    assert (verdict := classify(done).verdict).class_ == "no-failure-seen"
    assert verdict.confidence == 0.9
    failed = f"{done}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert classify(failed).verdict.class_ == "peer-exit"


def test_lines_that_name_an_error_where_nothing_failed_decide_nothing() -> None:
    frame = '(W pid=7) ERROR 01-29 07:44:33 worker.py:467]   File "/x/w.py", line 9, in NCCL_CHECK'
    assert classify(frame).verdict.class_ == "unknown"
    assert classify("CUDA used to build: 11.7\ncuDNN version: Could not collect\n").candidates
