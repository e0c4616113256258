"""Asks the process behind a socket to be a program, and ends as the program ends.

`python -I -S warm_client.py SOCKET WORDS`: see warm_python.py.
"""

import contextlib
import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(text)
    lines = server.makefile()
    pid = int(lines.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(lines.readline())
if code < 0:
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
