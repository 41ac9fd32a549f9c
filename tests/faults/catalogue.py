"""Catalogue of faults: action, files, expected error on every rank, and time limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

SOON = 8.0
"""Seconds until all ranks have the error of a failed rank or of a file."""
TIMEOUT = 6.0
"""``MATEX_TIMEOUT`` of the jobs."""
WAITED = TIMEOUT + 6.0
"""Seconds until all ranks have the error of an absent rank."""
KINDS = ("hdf5", "hdf5 gzip", "netcdf classic", "netcdf-4", "csv", "npy", "idx")
BOTH = (2, 4)


@dataclass(frozen=True)
class Fault:
    """Fault, and the expected result.

    Parameters
    ----------
    body : name of the function in ``tests.faults.job``.
    title : description for the table.
    kind : kind of file.
    ranks : numbers of ranks to run on.
    error : class of the error on every rank without the fault; None: all ranks receive all data.
    text : regular expression for the error, or for stderr if the job ended before.
    within : seconds until all ranks raise.
    handled : whether the script catches the error, and exits with code 0.
    quiet : whether ranks may end their loop without an error.
    any_rank : whether an error on one rank suffices.
    printed : regular expression for stderr in any case.
    again : number of ranks of a second job in the same folder.
    training : whether the job imports TensorFlow.
    launched : whether to use ``matex run``.
    """

    body: str
    title: str
    kind: str = "hdf5 gzip"
    ranks: tuple[int, ...] = BOTH
    error: str | None = "DataError"
    text: str = ""
    within: float = SOON
    handled: bool = False
    quiet: bool = False
    any_rank: bool = False
    printed: str = ""
    again: int | None = None
    training: bool = False
    launched: bool = False

    @property
    def abrupt(self) -> bool:
        """Return whether the job may end before the ranks raise an error, since one of them has failed or left."""
        gone = (
            "raise",
            "exit",
            "leave_hard",
            "killed",
            "crashed",
            "stopped",
            "late",
            "callback",
            "step",
            "generator",
            "other",
        )
        return self.body.startswith(gone)


def _each(fault: Fault, *kinds: str) -> list[Fault]:
    return [replace(fault, kind=kind) for kind in kinds]


SHORT = r"truncat|short|not as long|as long as|changed|beyond|ends"
CHANGED = r"changed|replaced|other file|another file"
LEFT = r"rank 1|this rank fails|another rank has left"
FAILS = "ValueError: this rank fails"
LATE = r"rank 1"
ABSENT = "another rank does not take part"  # before the first open_dataset, ranks cannot query one another

FAULTS: list[Fault] = [
    *_each(
        Fault("truncated_before", "file truncated before it is opened", text=SHORT),
        *("hdf5", "hdf5 gzip", "netcdf classic", "netcdf-4", "npy", "idx"),
    ),
    *_each(Fault("truncated_after", "file truncated after it was opened", text=SHORT), *KINDS),
    *_each(Fault("truncated_after_load", "file truncated before load()", text=SHORT), "hdf5", "npy"),
    *_each(Fault("truncated_between", "file truncated between two epochs", text=SHORT), "hdf5", "csv", "npy"),
    *_each(
        Fault("corrupt", "bytes of a chunk changed", error="DecodeError", text="data"),
        *("hdf5 gzip", "hdf5 shuffle", "hdf5 fletcher32", "netcdf-4"),
    ),
    Fault("corrupt_load", "bytes of a chunk changed, load()", error="DecodeError", text="data"),
    Fault("corrupt_handled", "bytes of a chunk changed; the script catches the error and reads on", handled=True),
    *_each(Fault("missing", "a file of the list is missing", text="nowhere"), "hdf5", "csv"),
    *_each(Fault("removed", "file removed after it was opened", text="data|no such|removed|changed"), "npy", "csv"),
    *_each(Fault("replaced", "file replaced by one of the same size", text=CHANGED), "hdf5", "hdf5 gzip", "csv", "npy"),
    *_each(Fault("replaced_between", "file replaced between two epochs", text=CHANGED), "npy"),
    Fault("forbidden", "no permission to read the file", "npy", text="ermission"),
    *_each(Fault("empty_file", "file emptied", text="data"), "hdf5", "csv", "npy"),
    Fault("raise_in_loop", "one rank raises in its loop over batches", text=LEFT, printed=FAILS),
    Fault("raise_in_loop", "one rank raises in its loop over batches", "csv", text=LEFT, printed=FAILS),
    Fault("raise_before_open", "one rank raises before open_dataset", "npy", text=LEFT, printed=FAILS),
    Fault("raise_before_load", "one rank raises before load()", text=LEFT, printed=FAILS),
    Fault("raise_between_epochs", "one rank raises between two epochs", text=LEFT, printed=FAILS),
    Fault("leave_loop", "one rank leaves its loop and ends", text="rank", quiet=True),
    Fault("exit_0", "one rank calls sys.exit(0) in its loop", text="rank", quiet=True),
    Fault("exit_3", "one rank calls sys.exit(3) in its loop", text="rank"),
    Fault("exit_0_before_open", "one rank calls sys.exit(0) before open_dataset", text="rank"),
    Fault(
        "leave_hard",
        "one rank calls os._exit(0) in its loop, in matex run",
        text="rank|exit",
        within=WAITED,
        training=True,
        launched=True,
    ),
    Fault("killed", "one rank is killed (SIGKILL) in its loop", text="(?i)kill|rank"),
    Fault("crashed", "one rank crashes (SIGSEGV) in its loop", text="SEGV|SIGSEGV|egmentation|rank"),
    Fault("stopped", "one rank is stopped (SIGSTOP) in its loop", text=LATE, within=WAITED),
    Fault("stopped_before_open", "one rank is stopped (SIGSTOP) before open_dataset", text=ABSENT, within=WAITED),
    Fault("late_for_open", "one rank sleeps before open_dataset", text=ABSENT, within=WAITED),
    Fault("late_in_loop", "one rank sleeps in its loop", text=LATE, within=WAITED),
    Fault("late_for_batches", "one rank sleeps before batches()", text=LATE, within=WAITED),
    Fault("late_for_seed", "one rank sleeps before batches(shuffle=True)", text=LATE, within=WAITED),
    Fault("late_for_statistics", "one rank sleeps before statistics()", text=LATE, within=WAITED),
    Fault("late_for_load", "one rank sleeps before load()", text=LATE, within=WAITED),
    Fault("late_for_drop", 'one rank sleeps before missing="drop"', text=LATE, within=WAITED),
    Fault("other_field", "one rank names a field that is not there", text="nonsense|same|rank", within=WAITED),
    Fault("other_format", "one rank names another format", text="rank|same|format", within=WAITED),
    Fault("unknown_option", "an unknown option", text="no_such_option"),
    Fault("other_method", "ranks call load() and statistics()", text="rank|same", within=WAITED, any_rank=True),
    Fault("other_loop", "ranks call batches() and load()", text="rank|same", within=WAITED, any_rank=True),
    Fault("other_batch_size", "ranks give different batch sizes", text="rank|same", within=WAITED),
    Fault("other_epochs", "one rank begins an epoch more than the others", text="rank", within=WAITED, any_rank=True),
    Fault("no_memory", "one rank has no memory left", text="memory"),
    Fault("two_threads", "two threads of each rank iterate over batches()", text="thread"),
    Fault("forked", "a child of each rank (fork) reads", error=None),
    Fault("slow_in_loop", "one rank takes long in its loop, less than the limit", error=None, within=TIMEOUT * 2),
    Fault("held_iterator", "ranks keep an iterator and work longer than the limit", error=None, within=TIMEOUT * 2),
    Fault("early_leavers", "ranks end long before rank 0", error=None, within=TIMEOUT * 2),
    Fault("work_between", "work of longer than the limit between epochs", error=None, within=TIMEOUT * 2),
    Fault("resumed", "killed in mid-epoch, resumed on 2 ranks", ranks=BOTH, error=None, again=2),
    Fault("callback_raises", "one rank raises in a callback", ranks=(2,), text=LEFT, printed=FAILS, training=True),
    Fault("callback_exits", "one rank calls sys.exit(0) in a callback", ranks=(2,), text="rank", training=True),
    Fault(
        "callback_leaves_hard",
        "os._exit(0) in a callback, in matex run",
        ranks=(2,),
        text="rank|exit",
        within=WAITED,
        training=True,
        launched=True,
    ),
    Fault("killed_in_training", "one rank is killed in fit", ranks=(2,), text="(?i)kill|rank", training=True),
    Fault("stopped_in_training", "one rank is stopped in fit", ranks=(2,), text="rank", within=WAITED, training=True),
    Fault("late_in_training", "callback of another rank longer than the limit", "hdf5 gzip", (2,), None, training=True),
    Fault("step_raises", "one rank raises within its train step", ranks=BOTH, text=LEFT, printed=FAILS, training=True),
    Fault("generator_raises", "one rank raises in its generator", ranks=(2,), text=LEFT, printed=FAILS, training=True),
    Fault("file_in_training", "bytes of a chunk changed, in fit", ranks=(2,), text="data", training=True),
    Fault("callback_of_stage_raises", "a stage raises", ranks=BOTH, text=LEFT, printed=FAILS, training=True),
    Fault("callback_of_stage_exits", "a stage calls sys.exit(0)", ranks=(2,), text="rank", training=True),
    Fault("killed_stage", "a stage is killed", ranks=(2,), text="(?i)kill|rank", training=True),
    Fault("stopped_stage", "a stage is stopped", ranks=BOTH, text="rank", within=WAITED, training=True),
    Fault(
        "step_of_stage_raises",
        "a stage raises within its step",
        ranks=(2,),
        error="InvalidArgumentError",
        text="this rank fails",
        training=True,
    ),
    Fault(
        "step_of_one_rank_raises", "a rank of a stage raises within its step", ranks=(4,), within=WAITED, training=True
    ),
    Fault(
        "file_of_stage",
        "bytes of a chunk changed, in stages",
        ranks=(2,),
        error="DecodeError",
        text="file '.*data.*', field 'x'",
        training=True,
    ),
    Fault(
        "unequal_steps",
        "ranks have different numbers of steps",
        ranks=(2,),
        text="number of (training )?steps",
        training=True,
    ),
    Fault(
        "disk_full",
        "no room for the checkpoint",
        ranks=(2,),
        error="DataError",
        text="cannot be written",
        training=True,
    ),
    Fault("damaged_checkpoint", "the checkpoint is damaged", ranks=(2,), text="checkpoint", training=True),
    Fault(
        "slow_callback", "callback of rank 0 longer than the limit", "hdf5", (2,), None, within=WAITED, training=True
    ),
    Fault("slow_save", "save of rank 0 longer than the limit", "hdf5", (2,), None, within=WAITED, training=True),
]

QUICK = (
    ("truncated_after", "npy"),
    ("replaced", "npy"),
    ("raise_in_loop", "hdf5 gzip"),
    ("killed", "hdf5 gzip"),
    ("late_in_loop", "hdf5 gzip"),
)
"""Faults that the default tests run, on 2 ranks."""
