"""Laws of warm_python.py: a forked program is a process like any other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.patience import HANG_S, eventually
from testkit.warm_python import REFUSED, warm_python

PROGRAMS = {
    "prints": "import sys; print(sys.argv, __name__, sys.stdin.read()); sys.stderr.write('e')",
    "ends with a code": "import sys; sys.exit(3)",
    "ends with words": "import sys; sys.exit('words')",
    "fails": "def f(): raise ValueError('a reason')\nf()",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "aborts": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "knows its place": "import os; print(os.getcwd(), os.environ['PLACE'])",
    "has threads": "import threading; threading.Timer(0.05, lambda: print('late')).start()",
    "leaves in order": "import atexit; atexit.register(print, 'last'); print('first')",
}


def _play(command: list[str], *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *words], cwd=folder, env=os.environ | {"PLACE": "here"}, input="given",
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_a_new_interpreter(name: str, tmp_path: Path) -> None:
    cold, warm = (
        _play(command, "-c", PROGRAMS[name], "word", folder=tmp_path)
        for command in ([sys.executable], warm_python().command)
    )
    assert (cold.returncode, cold.stdout) == (warm.returncode, warm.stdout)
    assert cold.stderr.splitlines()[-1:] == warm.stderr.splitlines()[-1:]


def test_a_script_and_what_it_spawns_run(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def double(n): return 2 * n\n")
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\nfrom beside import double\n"
        "def work(n): return double(n)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(sys.argv, pool.map(work, [1, 2]))\n"
    )
    done = _play(warm_python().command, "script.py", "word", folder=tmp_path)
    assert (done.stdout, done.returncode) == ("['script.py', 'word'] [2, 4]\n", 0), done.stderr


def test_nothing_is_left_for_the_next_program(tmp_path: Path) -> None:
    leave = "import os, torch; os.environ['LEFT'] = '1'; torch.left = 1; torch.manual_seed(5)"
    look = "import os, torch; print('LEFT' in os.environ, hasattr(torch, 'left'), torch.rand(1))"
    before, _, after = (
        _play(warm_python().command, "-c", code, folder=tmp_path) for code in (look, leave, look)
    )
    assert before.stdout == after.stdout
    assert after.stdout.startswith("False False")


def test_a_signal_arrives(tmp_path: Path) -> None:
    code = "import time; open('ready', 'w').close(); time.sleep(1000)"
    for number, ended in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        child = subprocess.Popen([*warm_python().command, "-c", code], cwd=tmp_path)
        assert eventually((tmp_path / "ready").exists)
        (tmp_path / "ready").unlink()
        child.send_signal(number)
        assert child.wait(HANG_S) == ended


def test_a_client_that_is_killed_while_it_asks_ends_itself_alone(tmp_path: Path) -> None:
    """It has said nothing, half of it, or all and does not wait for the answer."""
    command = warm_python().command
    text = json.dumps({"words": ["-c", ""], "folder": str(tmp_path), "environment": {}}).encode()
    for said in (b"", text[:9], text):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(command[-1])
            if said:
                socket.send_fds(client, [len(text).to_bytes(4, "big")], [0, 1, 2])
                client.sendall(said)
    assert _play(command, "-c", "print(1)", folder=tmp_path).stdout == "1\n"


def test_what_was_read_on_import_cannot_differ(tmp_path: Path) -> None:
    done = subprocess.run(
        [*warm_python().command, "-c", "print('never')"],
        env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert "another value of HF_HOME" in done.stderr
