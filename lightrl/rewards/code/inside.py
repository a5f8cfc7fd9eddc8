"""The first process of a sandbox: makes its namespaces, then runs one program after another in it.

Owns what a program can see (a root of a few read-only folders, an empty /tmp, no network, no /proc)
and what it may use (resource limits, system calls). A script of its own, `python -I -S inside.py
DESCRIPTOR`, with the standard library alone, since it is started for every response. Must not be
told what a right answer is: a program that breaks out would find it here.

See namespaces(7), user_namespaces(7), pivot_root(2), seccomp(2). Started by root, root makes the
mounts and becomes nobody; started by anybody else, a user namespace comes first.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time

NOBODY = 65534  # outside, if root starts us
INSIDE = 1000  # the only user there is inside

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2

MOUNT_SETATTR = 442  # the same number everywhere

DEVICES = ("null", "random", "urandom")  # /dev/zero is shared memory for who maps it
ROOTS = ("/tmp", "/mnt", "/var/tmp", "/run")  # where the new root is put together
CHUNK = 1 << 16
MOST_DESCRIPTORS = 1 << 20  # that of the worker's socket may be any
STDERR_BYTES = 2000  # of its end: what went wrong

_libc = ctypes.CDLL(None, use_errno=True)


def main(descriptor: int) -> None:
    """Answers {"ready": true} or {"refused": why} to the first message, then every request."""
    _die_with_parent()
    signal.signal(signal.SIGINT, _nothing)  # the one that a program could end this process with
    outside = socket.socket(fileno=descriptor)
    setup, _ = receive(outside)
    try:
        if setup["folder"]:  # without walls
            os.chdir(setup["folder"])
            _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        else:
            _separate()
            first = os.fork()  # only children of this process are in the new pid namespace
            if first:
                outside.close()
                os.waitpid(first, 0)
                return
            _die_with_parent()
            _build_root(setup)
    except OSError as e:
        send(outside, {"refused": f"{e.filename or 'namespaces'}: {e.strerror}"})
        return
    kept = frozenset(os.listdir("."))  # packages may lie in /tmp
    send(outside, {"ready": True})
    with contextlib.suppress(EOFError):  # the worker has gone
        while True:
            request, payload = receive(outside)
            send(outside, *_answer(outside, request, payload, kept))


# --- what a program can see -----------------------------------------------------------------------


def _separate() -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if os.geteuid() == 0:
        _call("unshare", flags)
    else:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", flags | CLONE_NEWUSER)
        with _folder("/proc/self") as proc:
            _map_user(proc, user, group)


def _build_root(setup: dict) -> None:
    """`binds` are folders and files that are there to read; /tmp has room for `disk_bytes`."""
    binds = setup["binds"]
    with _folder("/proc/self") as proc:
        root = next(p for p in ROOTS if os.path.isdir(p) and not any(_within(b, p) for b in binds))
        _mount(None, "/", None, MS_REC | MS_PRIVATE)
        _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        os.mkdir(f"{root}/tmp")
        options = f"size={setup['disk_bytes']},nr_inodes=10000,mode=1777"
        _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
        for source in binds:
            _bind(source, root + source, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
        for name in DEVICES:
            _bind(f"/dev/{name}", f"{root}/dev/{name}", MOUNT_ATTR_NOSUID)
        for name, target in setup["links"].items():
            os.makedirs(os.path.dirname(root + name), exist_ok=True)
            os.symlink(target, root + name)
        os.chdir(root)
        _call("syscall", setup["pivot_root"], b".", b".")
        _call("umount2", b".", MNT_DETACH)
        os.chdir("/tmp")
        _set_attributes("/", MOUNT_ATTR_RDONLY, 0)
        socket.sethostname("sandbox")
        if os.geteuid() == 0:
            _become_nobody(proc)
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program may not look into this process


def _become_nobody(proc: int) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _die_with_parent()  # forgotten when the user changes
    _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root still
    _call("unshare", CLONE_NEWUSER)
    _map_user(proc, NOBODY, NOBODY)


def _map_user(proc: int, user: int, group: int) -> None:
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE} {user} 1"),
        ("gid_map", f"{INSIDE} {group} 1"),
    ):
        written = os.open(file, os.O_WRONLY, dir_fd=proc)
        try:
            os.write(written, text.encode())
        finally:
            os.close(written)


def _bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, MS_BIND | MS_REC)
    _set_attributes(target, attributes | MOUNT_ATTR_RDONLY, AT_RECURSIVE)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


@contextlib.contextmanager
def _folder(path: str, within: int | None = None):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- one program ----------------------------------------------------------------------------------


def _answer(
    outside: socket.socket, request: dict, payload: bytes, kept: frozenset[str]
) -> tuple[dict, bytes]:
    try:
        with _folder(".") as here:
            _empty(here, kept)  # else what one program leaves there stops the next
        for name, size in request["files"]:
            with open(name, "xb") as file:
                file.write(payload[:size])
            payload = payload[size:]
        return _run(outside, request, payload)
    except OSError as e:  # without walls an earlier program may have removed the folder
        return {"status": "refused", "code": 0, "wall_s": 0.0, "errors": str(e)}, b""


def _empty(folder: int, kept: frozenset[str]) -> None:
    """Of all but `kept`, however much it is, however deep, and whoever may read it: what lies in a
    folder within is moved up, so no path gets too long and no descriptors run out."""
    with contextlib.suppress(PermissionError):  # started by root, it is root's
        os.fchmod(folder, 0o700)
    while names := set(os.listdir(folder)) - kept:
        for name in names:
            if not _open_up(name, folder):
                os.unlink(name, dir_fd=folder)
                continue
            with _folder(name, folder) as inner:
                for each in os.listdir(inner):
                    _open_up(each, inner)
                    free = os.urandom(16).hex()
                    os.rename(each, free, src_dir_fd=inner, dst_dir_fd=folder)
            os.rmdir(name, dir_fd=folder)


def _open_up(name: str, folder: int) -> bool:
    """Whether it is a folder, which then may be changed."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    os.chmod(name, 0o700, dir_fd=folder)
    return True


def _run(outside: socket.socket, request: dict, stdin: bytes) -> tuple[dict, bytes]:
    """Runs `request["argv"]` until it ends, writes too much or has taken too long. What it started
    ends with it."""
    given = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(given, "wb", closefd=False) as file:
        file.write(stdin)
    os.lseek(given, 0, os.SEEK_SET)
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)  # it is memory
    out, out_w = os.pipe()
    err, err_w = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_program(request, given, out_w, err_w)
    for descriptor in (given, out_w, err_w):
        os.close(descriptor)
    collected = {out: bytearray(), err: bytearray()}
    ended = os.pidfd_open(child)
    status = "exited"
    waiting = select.poll()
    for descriptor in (outside.fileno(), ended, out, err):
        waiting.register(descriptor, select.POLLIN)
    while True:
        left_s = began + request["time_s"] - time.monotonic()
        ready = [d for d, _ in waiting.poll(max(0.0, left_s) * 1000)]
        if outside.fileno() in ready:  # nobody speaks to us now: the worker has gone
            os._exit(0)
        for descriptor in {out, err} & set(ready):
            if not _read(descriptor, collected[descriptor]):
                waiting.unregister(descriptor)
            del collected[err][:-STDERR_BYTES]
        if len(collected[out]) > request["output_bytes"]:
            status = "output"
        elif left_s <= 0:
            status = "timeout"
        if status != "exited" or ended in ready:
            break
    wall_s = time.monotonic() - began
    os.close(ended)
    code = _end_all(child)
    for descriptor in (out, err):
        # Once nobody holds the other end, what is left in a pipe ends with its end.
        while len(collected[out]) <= request["output_bytes"] and _read(
            descriptor, collected[descriptor]
        ):
            del collected[err][:-STDERR_BYTES]
        os.close(descriptor)
    if status == "exited" and len(collected[out]) > request["output_bytes"]:
        status = "output"
    output = bytes(collected[out][: request["output_bytes"]])
    errors = collected[err].decode(errors="replace")
    return {"status": status, "code": code, "wall_s": wall_s, "errors": errors}, output


def _read(descriptor: int, into: bytearray) -> bool:
    data = os.read(descriptor, CHUNK)
    into += data
    return bool(data)


def _end_all(child: int) -> int:
    """Ends the program and what it started. Returns the program's exit status."""
    code = 0
    while True:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything inside but this process
        else:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)  # none is reaped by anybody else, so it is still ours
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    """Without walls: of this process, to which every orphan of the program falls."""
    with open("/proc/thread-self/children") as file:
        return [int(pid) for pid in file.read().split()]


def _become_program(request: dict, *streams: int) -> None:
    """Ends in `execve`; the program has one user, no capability and the streams alone."""
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, MOST_DESCRIPTORS)
        limits = {
            resource.RLIMIT_AS: request["memory_bytes"],
            resource.RLIMIT_CPU: int(request["time_s"]) + 1,
            resource.RLIMIT_FSIZE: request["file_bytes"],
            resource.RLIMIT_NPROC: request["processes"],
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_STACK: 64 << 20,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _refuse_system_calls(bytes.fromhex(request["filter"]))
        os.execve(request["argv"][0], request["argv"], request["environment"])
    except OSError as e:
        os.write(2, str(e).encode())
    finally:  # whatever it is, this process must not go on as its parent
        os._exit(127)


def _refuse_system_calls(program: bytes) -> None:
    """`program`: what `system_calls.py` has made for this processor."""
    lines = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    )
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0)


# --- the kernel, and the worker outside -----------------------------------------------------------


def _call(function: str, *arguments: object, file: str | None = None) -> None:
    if getattr(_libc, function)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file or function)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [s.encode() if s is not None else None for s in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), data.encode() or None, file=target)


def _set_attributes(target: str, attributes: int, flags: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    arguments = (AT_FDCWD, target.encode(), flags, wanted, ctypes.c_size_t(len(wanted)))
    _call("syscall", MOUNT_SETATTR, *arguments, file=target)


def _nothing(number: int, frame: object) -> None:
    pass  # and not SIG_IGN, which programs would inherit


def _die_with_parent() -> None:
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def send(to: socket.socket, header: dict, payload: bytes = b"") -> None:
    text = json.dumps(header).encode()
    to.sendall(struct.pack("<II", len(text), len(payload)) + text + payload)


def receive(source: socket.socket) -> tuple[dict, bytes]:
    """Raises EOFError once the other side has gone."""
    sizes = struct.unpack("<II", _exactly(source, 8))
    header = json.loads(_exactly(source, sizes[0]))
    return header, _exactly(source, sizes[1])


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
