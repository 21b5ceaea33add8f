"""Reward functions that nobody should run: each tries one thing and prints what came of it as JSON.

They know what to look for, which real ones would have to guess.
"""

from __future__ import annotations

import json

_HEAD = """
import ctypes, glob, json, os, signal, socket, subprocess, sys, time
known = json.loads(%r)
got = {}
# Written backwards where it was said: it must be found nowhere else.
needle = known.get('needle', '')[::-1].encode()
def put(path, text):
    with open(path, 'w') as file:
        file.write(text)
    return 'written'
def attempt(name, call):
    try:
        got[name] = repr(call())[:500]
    except BaseException as error:
        got[name] = None
"""
_TAIL = """
print(json.dumps(got))
"""


def _program(body: str, **known: object) -> str:
    return _HEAD % json.dumps(known) + body + _TAIL


def network(addresses: list[list[object]], abstract: str, sockets: list[str]) -> str:
    """Any way out of the machine, or to something that listens on it."""
    return _program(
        """
for address in known['addresses']:
    attempt(f'tcp {address}', lambda: socket.create_connection(tuple(address), 2))
attempt('dns', lambda: socket.getaddrinfo('example.com', 80))
attempt('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('203.0.113.1', 9)))
def unix(path):
    one = socket.socket(socket.AF_UNIX)
    one.connect(path)
    return one
attempt('abstract', lambda: unix('\\0' + known['abstract']))
for path in known['sockets']:
    attempt(f'unix {path}', lambda: unix(path))
attempt('raw', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
got['interfaces'] = [name for _, name in socket.if_nameindex()]
""",
        addresses=addresses,
        abstract=abstract,
        sockets=sockets,
    )


def files(secrets: list[str], closed: list[str], needle: str, top: str = "/") -> str:
    """Reads what it should not see, writes where it should not, and searches all it can open for a needle."""
    return _program(
        """
for path in known['secrets']:
    attempt(f'read {path}', lambda: open(path).read())
for path in known['closed']:
    attempt(f'write {path}', lambda: put(os.path.join(path, 'left-here'), 'x'))
found = []
for top, folders, names in os.walk(known['top']):
    folders[:] = [one for one in folders if os.path.join(top, one) not in ('/proc', '/sys', '/usr', '/dev')]
    for name in names:
        try:
            if needle in open(os.path.join(top, name), 'rb').read(1 << 20):
                found.append(os.path.join(top, name))
        except OSError:
            pass
got['needle'] = found
""",
        secrets=secrets,
        closed=closed,
        needle=needle[::-1],
        top=top,
    )


def processes(pids: list[int], needle: str) -> str:
    """Other processes: their environment, their memory, signals to them."""
    return _program(
        """
libc = ctypes.CDLL(None, use_errno=True)
def traced(pid):
    # Seized and not attached to: that would stop it.
    if libc.ptrace(0x4206, pid, 0, 0):
        raise OSError(ctypes.get_errno())
    return 'attached'
for pid in known['pids']:
    attempt(f'environment {pid}', lambda: open(f'/proc/{pid}/environ').read())
    attempt(f'memory {pid}', lambda: open(f'/proc/{pid}/mem', 'rb').read(1))
    attempt(f'root {pid}', lambda: os.listdir(f'/proc/{pid}/root/'))
    attempt(f'ptrace {pid}', lambda: traced(pid))
    attempt(f'kill {pid}', lambda: os.kill(pid, 0))
got['needle'] = []
for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
    try:
        if needle in open(path, 'rb').read():
            got['needle'].append(path)
    except OSError:
        pass
got['others'] = len([name for name in os.listdir('/proc') if name.isdigit()])
""",
        pids=pids,
        needle=needle[::-1],
    )


def privileges() -> str:
    """What the kernel should not let it do. Never run this where it may: it does it."""
    return _program(
        """
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno())
    return 'done'
attempt('setuid', lambda: os.setuid(0))
attempt('chown', lambda: os.chown('.', 0, 0))
attempt('mknod', lambda: os.mknod('disk', 0o060600, os.makedev(8, 0)))
attempt('mount', lambda: call(libc.mount, b'none', b'/tmp', b'tmpfs', 0, None))
attempt('remount', lambda: call(libc.mount, None, b'/usr', None, 0x20 | 0x1000, None))
attempt('chroot', lambda: os.chroot('/tmp'))
attempt('hostname', lambda: socket.sethostname('mine'))
attempt('core pattern', lambda: put('/proc/sys/kernel/core_pattern', '|/tmp/x'))
attempt('sysrq', lambda: put('/proc/sysrq-trigger', 'h'))
attempt('user namespace', lambda: call(libc.unshare, 0x10000000))
attempt('any namespace', lambda: call(libc.unshare, 0x00020000))
if os.uname().machine == 'x86_64':
    attempt('keyctl', lambda: call(lambda: min(0, libc.syscall(250, 0, -3, 0))))
    attempt('bpf', lambda: call(lambda: min(0, libc.syscall(321, 0, None, 0))))
    attempt('perf', lambda: call(lambda: min(0, libc.syscall(298, None, 0, -1, -1, 0))))
    attempt('clone', lambda: call(lambda: min(0, libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))))
attempt('nice', lambda: os.nice(-10))
attempt('oom', lambda: put('/proc/self/oom_score_adj', '-1000'))
attempt('limits', lambda: __import__('resource').setrlimit(6, (1 << 20, 1 << 20)))
for path in glob.glob('/sys/fs/cgroup/**/pids.max', recursive=True):
    attempt(f'cgroup {path}', lambda: put(path, 'max'))
attempt('kernel log', lambda: open('/dev/kmsg').read(1))
status = open('/proc/self/status').read()
lines = [line for line in status.splitlines() if line.startswith(('CapEff', 'CapPrm'))]
got['capabilities'] = [line.split()[1].strip('0') for line in lines]
got['no new privileges'] = 'NoNewPrivs:\\t1' in status
got['uid'] = os.getuid()
shell = ['sh', '-c', 'id -u; su -c id 2>/dev/null; true']
got['suid'] = subprocess.run(shell, capture_output=True, text=True).stdout
"""
    )


FORK_BOMB = """
import os, time
open('up', 'w').write('1')
most = 0
while True:
    try:
        if os.fork() == 0:
            most = 0
    except OSError:
        open('refused', 'w').write('1')
        time.sleep(0.05)
"""

MEMORY_BOMB = """
import os
pieces = []
open('up', 'w').write('1')
while True:
    pieces.append(os.urandom(1 << 22))
"""

#: Memory file systems count as memory.
MEMORY_FILES = "for n in range(1 << 20): open(f'/tmp/{n}', 'wb').write(bytes([7]) * (8 << 20))"

#: Puts links where the daemon will read, and where the next attempt will be.
LINKS = """
import os, sys
victim, job = sys.argv[1:]
for name in ('log', 'progress.jsonl', 'result.json', 'exit.json', 'start.json', 'stop-asked.json'):
    if os.path.lexists(name):
        os.unlink(name)
    os.symlink(victim, name)
os.symlink('/', os.path.join(job, 'attempt_2'))
os.mkfifo('plan.json')
print('after')
"""
