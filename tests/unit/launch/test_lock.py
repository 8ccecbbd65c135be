import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from hpcfsdp.errors import UsageError
from hpcfsdp.launch import lock
from hpcfsdp.launch.lock import NAME, Holder, RunLock


@pytest.fixture
def hold(tmp_path):
    """``hold(**changes)``: the folder is held by a job that differs from this process in what is given."""

    def write(**changes):
        holder = dataclasses.replace(Holder.here(), **changes)
        (tmp_path / NAME).write_text(json.dumps(dataclasses.asdict(holder)))

    return write


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "LOOK_S", 0.01)
    monkeypatch.setattr(lock, "SILENT_S", 0.1)


def holder_of(folder):
    return json.loads((folder / NAME).read_text())["pid"]


def acquire(folder, **options):
    mine = RunLock(folder)
    mine.acquire(**options)
    mine.release()


def test_a_folder_is_held_until_it_is_given_back(tmp_path):
    folder = tmp_path / "a" / "run"
    first = RunLock(folder)
    first.acquire()
    assert os.listdir(folder) == [NAME]
    with pytest.raises(
        UsageError, match=rf"another training uses .*: process {os.getpid()} on .*, since 20.*--take_over true"
    ):
        RunLock(folder).acquire()
    first.check()
    first.release()
    assert os.listdir(folder) == []
    acquire(folder)


def test_a_job_with_an_ended_process_on_this_system_holds_nothing(tmp_path, hold):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(pid=ended.pid)
    acquire(tmp_path)
    hold(started="1")  # another process has its number
    acquire(tmp_path)


def test_a_job_that_its_scheduler_starts_again_takes_its_folder_back(tmp_path, hold, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    hold(host="elsewhere", system="other", restart="0")
    assert lock.training_in(tmp_path) is None  # at once, although the file was just touched
    acquire(tmp_path)
    hold(host="elsewhere", restart="1")
    with pytest.raises(UsageError, match=r"job 77, process .* on elsewhere"):  # another step of the same job
        acquire(tmp_path)


def test_a_holder_elsewhere_is_alive_if_it_touches_the_file(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(lock, "LOOK_S", 0.01)
    hold(host="elsewhere", system="other")
    os.utime(tmp_path / NAME, (1, 1))
    alive = threading.Timer(0.1, os.utime, [tmp_path / NAME])
    alive.start()
    with pytest.raises(UsageError, match="on elsewhere"):
        acquire(tmp_path)
    alive.join()


@pytest.mark.parametrize("text", [None, "", "{}", "[1]"])
def test_a_holder_elsewhere_that_is_silent_is_dead(tmp_path, hold, quick, text):
    hold(host="elsewhere", system="other")
    if text is not None:
        (tmp_path / NAME).write_text(text)
    acquire(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_holder_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    mine = RunLock(tmp_path)
    mine.acquire()
    os.utime(tmp_path / NAME, (1, 1))
    while (tmp_path / NAME).stat().st_mtime == 1:
        pass
    mine.release()


def test_the_holder_of_a_folder_raises_after_another_job_has_taken_it_over(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    second.acquire(by_force=True)
    with pytest.raises(UsageError, match=r"has been taken over by another training: .*saves nothing more"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_stale_file_that_another_job_replaces_stays(tmp_path, hold, quick, monkeypatch):
    hold(host="elsewhere", system="other")
    monkeypatch.setattr(lock.log, "warning", lambda text, *_: hold() if "takes the folder over" in text else None)
    with pytest.raises(UsageError, match=f"another training uses .*process {os.getpid()} on"):
        acquire(tmp_path)
    assert holder_of(tmp_path) == os.getpid() and os.listdir(tmp_path) == [NAME]


def test_of_jobs_that_find_the_same_stale_file_one_takes_the_folder(tmp_path, hold, monkeypatch):
    hold(pid=0)
    read, compared = lock._read, threading.Event()

    def read_slowly(path):
        found = read(path)
        slow_reads.extend([found] if threading.current_thread() is slow else [])
        if threading.current_thread() is slow and len(slow_reads) == 2:  # it has compared, and removes the file later
            compared.set()
            time.sleep(0.2)
        return found

    def take(results):
        try:
            RunLock(tmp_path).acquire()
            results.append("taken")
        except UsageError as error:
            results.append(str(error))

    monkeypatch.setattr(lock, "_read", read_slowly)
    monkeypatch.setattr(lock, "LOOK_S", 0.5)
    slow_reads, results = [], []
    slow = threading.Thread(target=take, args=(results,))
    slow.start()
    assert compared.wait(10)
    take(results)
    slow.join(10)
    assert sorted(result.partition(" uses")[0] for result in results) == ["another training", "taken"]


def test_a_file_that_does_not_fit_on_the_disk_is_not_left(tmp_path, monkeypatch):
    def create(path):
        path.touch()
        return open("/dev/full", "wb")

    with monkeypatch.context() as full:
        full.setattr(lock.safe_files, "create", create)
        with pytest.raises(OSError, match="No space left"):
            RunLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == []
    acquire(tmp_path)


def test_a_folder_that_is_removed_is_reported_and_made_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    folder = tmp_path / "run"
    mine = RunLock(folder)
    mine.acquire()
    with caplog.at_level("ERROR", "hpcfsdp"):
        shutil.rmtree(folder)
        while not caplog.messages:
            pass
        mine.check()
    assert caplog.messages == [
        f"the run's folder {folder} was removed during the training; the next save creates it again"
    ]
    assert holder_of(folder) == os.getpid()
    mine.release()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "huge", "types", "deep", "link"])
def test_what_is_no_lock_is_replaced_and_nothing_is_followed(tmp_path, quick, give_away, kind):
    victim, path = tmp_path / "victim", tmp_path / "run" / NAME
    path.parent.mkdir()
    victim.write_text(json.dumps(dataclasses.asdict(Holder.here())))
    written_s = victim.stat().st_mtime_ns
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(victim)
        give_away(path)
    else:
        sound = dataclasses.asdict(Holder.here())
        odd = {"huge": {"host": "x" * (1 << 20)}, "types": {"pid": "../../etc"}, "deep": {}}[kind]
        path.write_text("[" * 100_000 if kind == "deep" else json.dumps(sound | odd))
    assert lock.training_in(path.parent) is None
    acquire(path.parent)
    assert os.listdir(path.parent) == []
    assert victim.stat().st_mtime_ns == written_s


def test_a_process_that_the_system_hides_may_run(monkeypatch):
    assert lock.runs(os.getpid(), lock.started(os.getpid()))
    assert lock.runs(os.getpid(), "1") is False
    monkeypatch.setattr(lock, "started", lambda pid: "")  # as with hidepid
    assert lock.runs(os.getpid(), "1") is None
    assert lock.runs(1 << 22, "1") is False
    assert lock.runs(-1, "1") is False
