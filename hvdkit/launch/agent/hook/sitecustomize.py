"""Let the Python of a rank report its end, and let a spare wait before it runs its command.

Python imports this module at its start, because its folder is the first of PYTHONPATH. The process
was started with the command of a rank. If it is a spare, this module imports the modules that the
agent names, and waits. When the agent sends the environment of a rank, the module ends, and Python
runs the command as always. So arguments, flags, module path, tracebacks and exit status are those
of Python itself. Only the first Python of a rank imports the module: programs that it starts do not
inherit the folder. The module uses only the standard library, because the Python of the ranks may
not have hvdkit.
"""

import os
import sys

_VARIABLE = "HVDKIT_SPARE"
# The processes of a job are found by this variable (`hvdkit.system.processes`).
_GROUP_VARIABLE = "HVDKIT_RANK_GROUP"


def _wait_as_spare(agent: int) -> None:
    """Import modules until the agent sends the environment of a rank."""
    import json  # here, because only a process that waits as a spare needs it

    if _environment_at_start() != {**os.environ, "LC_CTYPE": ""}:
        # The user's `sitecustomize` or a .pth file has changed variables. The changes may depend on
        # variables of the rank, which have other values in the next start.
        os._exit(1)
    adjustment = _read("/proc/self/oom_score_adj")
    # If the host runs out of memory, the kernel should end spares first.
    _write("/proc/self/oom_score_adj", "1000")
    made: dict = {}  # the variables that imports have set
    rest = b""
    while True:
        while b"\n" not in rest:
            data = os.read(agent, 65536)
            if not data:
                os._exit(0)  # the agent has ended
            rest += data
        line, rest = rest.split(b"\n", 1)
        message = json.loads(line)
        if message["kind"] == "start":
            break
        _set_environment(message["environment"])
        _import(message["modules"], message["path"], message["file"])
        made.update(
            (name, value)
            for name, value in os.environ.items()
            if message["environment"].get(name) != value
        )
        os.write(agent, b"ready\n")
    os.chdir(message["directory"])
    _set_environment({**message["environment"], **made})
    _write("/proc/self/oom_score_adj", adjustment)
    os.write(agent, b"started\n")
    os.close(agent)


def _import(modules: dict, path: list, file: str) -> None:
    """Import modules as the script does: the script's folder is first in the module path."""
    main = sys.modules["__main__"]
    sys.path[:0] = path
    if file:
        main.__file__ = file
    try:
        for name, origin in modules.items():
            __import__(name)
            if getattr(sys.modules[name].__spec__, "origin", None) != origin:
                os._exit(1)  # the script has changed the module path
    except BaseException:
        os._exit(1)
    finally:
        del sys.path[: len(path)]
        if file:
            del main.__file__


def _environment_at_start() -> dict:
    """Return the variables that this process was started with. Python itself sets LC_CTYPE."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [pair.partition(b"=") for pair in file.read().split(b"\0") if pair]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    environment.pop(_VARIABLE, None)
    return {**environment, "LC_CTYPE": ""}


def _set_environment(environment: dict) -> None:
    for name in set(os.environ) - set(environment) - {_GROUP_VARIABLE}:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        pass


def _restore_path(folder: str) -> None:
    """Remove the folder of this module from PYTHONPATH."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if paths[0] == folder:
        del paths[0]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        if not paths:
            del os.environ["PYTHONPATH"]


def _run() -> None:
    """Run the user's `sitecustomize`. Wait, if this process is a spare. Then run as a rank."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        from _hvdkit_self_report import install  # type: ignore[import-not-found]
    except Exception:  # an earlier version of Python
        install = None
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    sys.path_importer_cache.pop(folder, None)
    sys.modules.pop("sitecustomize", None)
    descriptor = os.environ.pop(_VARIABLE, "")
    missing = None
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        missing = error
    # A wrapper in the command may start another Python first. This Python inherits the variable,
    # but the agent has not started it in a session of its own, so it is no spare.
    if descriptor and os.getsid(0) == os.getpid():
        import site

        if site.ENABLE_USER_SITE:
            site.execusercustomize()
        try:
            _wait_as_spare(int(descriptor))
        except BaseException:
            # Python would ignore an error here, and run the command, but the agent starts another
            # process for the rank.
            os._exit(1)
    _restore_path(folder)
    if install is not None:
        install()
    if missing is not None:
        raise ImportError("there is no sitecustomize", name="sitecustomize")


if __name__ == "sitecustomize":
    _run()
