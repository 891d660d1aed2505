"""The public names of Horovod's modules: hvdkit's modules have them, with compatible arguments."""

import importlib
import inspect


def own_names(module):
    """Return the public functions and classes that a module of Horovod defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


def public_names(module):
    """Return the public functions, methods and classes of Horovod that a module has."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and str(getattr(value, "__module__", "")).startswith("horovod.")
    }


def accepts(ours, horovods):
    """Return whether `ours` accepts all positional and keyword arguments of `horovods`."""
    theirs = list(inspect.signature(horovods).parameters.values())
    mine = inspect.signature(ours).parameters
    variadic = {p.kind for p in mine.values()}
    places = [p for p in mine.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    for place, parameter in enumerate(theirs):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in mine:
            if parameter.kind != parameter.KEYWORD_ONLY and (
                place >= len(places) or places[place].name != parameter.name
            ):
                return False
            if parameter.default is not parameter.empty and (
                mine[parameter.name].default is parameter.empty
            ):
                return False
        elif not {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} <= variadic:
            return False
    required = {p.name for p in theirs if p.default is p.empty}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        p.name in required for p in mine.values() if p.default is p.empty and p.kind not in kinds
    )


def check(name):
    """Compare a module of hvdkit with Horovod's, such as "torch" or "torch.elastic"."""
    horovods, ours = (
        importlib.import_module(f"{package}.{name}") for package in ("horovod", "hvdkit")
    )
    # Horovod's modules have no `__all__`, and scripts use names of these two modules.
    is_namespace = "." not in name or name.endswith(".mpi_ops")
    wanted = public_names(horovods) if is_namespace else own_names(horovods)
    # Not the classes behind DistributedOptimizer and the functions of autograd.
    wanted = {each for each in wanted if not each.startswith("Horovod") or each.endswith("Error")}
    assert not {
        each for each in [*wanted, *getattr(ours, "__all__", ())] if not hasattr(ours, each)
    }
    for each in sorted(wanted):
        theirs, mine = getattr(horovods, each), getattr(ours, each)
        try:
            assert theirs is mine or accepts(mine, theirs), (
                f"{each}{inspect.signature(mine)} for {each}{inspect.signature(theirs)}"
            )
        except ValueError as error:
            assert "no signature" in str(error)  # noqa: PT017
