"""Interleaved measurements: each reader has its own processes, and other load meets all readers alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from threading import Timer
from typing import IO, Any

import psutil

from benchmarks.harness.data import Task

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 300.0  # seconds for one answer, where a reader does not say another
END_LIMIT = 20.0  # seconds to end in
LAST_WORDS = 3000  # characters of a failed reader's output
SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "GRPC_VERBOSITY": "NONE"}


@dataclass(frozen=True)
class Reader:
    """Reader to measure.

    Parameters
    ----------
    name : for the table.
    kind : "ours", "peer" or "ceiling".
    function : "room.function" that makes a pass of a task.
    options : of the function.
    ranks : processes under ``mpiexec``; 1: none of it.
    threads : that decode, on each rank; 0: its share of the cores.
    pinned : each rank has one core for itself.
    launcher : arguments of ``matex`` that start the process as a script; empty: none.
    environment : variables of the process.
    polls : the processes use their cores also while they wait for a request, so they are stopped until then.
    limit : seconds for one answer.
    """

    name: str
    kind: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    threads: int = 0
    pinned: bool = False
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    polls: bool = False
    limit: float = TIME_LIMIT


@dataclass
class Result:
    """Figures of each repetition of a reader: lists of equal length."""

    reader: Reader
    task: Task
    answers: list[dict[str, float]] = field(default_factory=list)
    missing: str = ""

    @property
    def rates(self) -> list[float]:
        """Return samples per second of each repetition."""
        return [answer["samples"] / answer["seconds"] for answer in self.answers]

    @property
    def rate(self) -> float:
        """Return the median of samples per second; 0 if it could not be measured."""
        return median(self.rates) if self.answers else 0.0

    @property
    def bytes_rate(self) -> float:
        """Return decoded bytes of the inputs per second."""
        return self.rate * self.task.sample_bytes

    @property
    def epoch_cpu(self) -> float:
        """Return the CPU seconds of an epoch, estimated where a pass is shorter than an epoch."""
        return median([answer["cpu"] / answer["samples"] for answer in self.answers]) * self.task.samples

    def over(self, other: Result) -> float:
        """Return the ratio to another result's rate: the median of the ratios within each repetition."""
        pairs = [ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=False)]
        return median(pairs) if pairs else float("nan")

    def figure(self, name: str) -> float:
        """Return the median of a probe's figure."""
        return median([answer[name] for answer in self.answers])


def interleaved(task: Task, readers: Sequence[Reader], repetitions: int) -> list[Result]:
    """Run one pass of each reader after the other, in several rounds.

    Raises
    ------
    RuntimeError : a reader ends or does not answer.
    """
    results = [Result(reader, task) for reader in readers]
    with ExitStack() as stack:
        running = [stack.enter_context(_started(result)) for result in results]
        for result, process in zip(results, running, strict=True):
            result.missing = process.missing()
            process.pause()
        for _ in range(repetitions):
            for result, process in zip(results, running, strict=True):
                if not result.missing:
                    result.answers.append(process.answer())
    return results


def afresh(task: Task, reader: Reader, repetitions: int) -> Result:
    """Run a probe in a new process for each repetition."""
    (result,) = interleaved_afresh(task, [reader], repetitions)
    return result


def interleaved_afresh(task: Task, readers: Sequence[Reader], repetitions: int) -> list[Result]:
    """Run one probe after the other, in several rounds, each in a new process."""
    results = [Result(reader, task) for reader in readers]
    for _ in range(repetitions):
        for result in results:
            if not result.missing:
                with _started(result) as process:
                    result.missing = process.missing()
                    if not result.missing:
                        result.answers.append(process.answer())
    return results


@dataclass(frozen=True)
class _Running:
    """Process of a reader, and the file that receives the output of its libraries."""

    reader: Reader
    process: subprocess.Popen[str]
    talk: IO[str]

    def missing(self) -> str:
        """Wait until the process is ready; return what it lacks, or an empty string."""
        return str(self._line().get("missing", ""))

    def answer(self) -> dict[str, Any]:
        """Request passes and return the answer."""
        self.resume()
        with suppress(BrokenPipeError):  # it has ended; its last output says why
            self.process.stdin.write("pass\n")
            self.process.stdin.flush()
        answer = self._line()
        self.pause()
        return answer

    def pause(self) -> None:
        """Stop the processes of a reader that polls."""
        for process in self._polling():
            process.suspend()

    def resume(self) -> None:
        """Let the processes of a reader that polls go on."""
        for process in self._polling():
            process.resume()

    def _polling(self) -> list[psutil.Process]:
        if not self.reader.polls or self.process.poll() is not None:
            return []
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def _line(self) -> dict[str, Any]:
        timer = Timer(self.reader.limit, self.process.terminate)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line.strip():  # mpiexec writes an empty line when its ranks end
            self.talk.seek(0)
            last = self.talk.read()[-LAST_WORDS:]
            raise RuntimeError(f"{self.reader.name}: ended, or did not answer within {self.reader.limit:g} s\n{last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _started(result: Result) -> Iterator[_Running]:
    reader = result.reader
    spec = {"function": reader.function, "options": dict(reader.options), "ranks": reader.ranks}
    spec |= {"pinned": reader.pinned}
    worker = ["-m", "benchmarks.harness.worker"]
    if reader.launcher:
        worker = ["-m", "matex_data", *reader.launcher, str(ROOT / "benchmarks" / "harness" / "worker.py")]
    command = [sys.executable, *worker, json.dumps(spec | {"task": asdict(result.task)})]
    if reader.ranks > 1:
        command = [mpiexec(), "-n", str(reader.ranks), *(["-bind-to", "core"] if reader.pinned else []), *command]
    threads = reader.threads or max(1, len(os.sched_getaffinity(0)) // reader.ranks)
    environment = {**os.environ, **SETTINGS, "MATEX_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    environment |= reader.environment
    with tempfile.TemporaryFile("w+") as talk:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=talk, text=True)
        running = _Running(reader, process, talk)
        try:
            yield running
        finally:
            running.resume()
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Close the input of a process and wait for its end; terminate it after ``END_LIMIT`` seconds."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec passes it on to its ranks
        process.wait()


def mpiexec() -> str:
    """Return the ``mpiexec`` of this environment, else that of the system."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
