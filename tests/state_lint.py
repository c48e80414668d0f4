"""Finds state that the DSL would not carry through a dynamic loop.

The DSL carries what is *rebound or called by local name* inside a dynamic ``if``, ``for`` or
``while``. A pipeline end, a scheduler or an MMA atom that is advanced anywhere else compiles and
gives a wrong kernel without a word: the stage index and the parity become constants. So, in every
function:

1. an end is advanced by the name of a local variable: not an attribute (of ``self``, of a frozen
   value), not an element of a dict or list;
2. whoever advances ends that came in by a parameter returns them, and the caller rebinds them;
3. the new scheduler of ``sched.next()`` is bound to the old name;
4. an MMA atom whose ACCUMULATE field is set was made in the same function;
5. a traced function assigns no attribute of ``self``;
6. every producer ends with ``.tail()``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from . import tree

ADVANCING = {"acquire_and_advance", "wait_and_advance", "acquire", "advance", "tail"}
SUCCESSORS = {"next", "take"}  # of a scheduler
MAKERS_PRODUCER = {"make_producer", "round_producer", "lane_producer"}
MAKERS_CONSUMER = {"make_consumer", "round_consumer", "lane_consumer"}
ATOM_MAKERS = {"make_mma_atom", "make_tiled_mma"}
Finding = tuple[int, str]


def findings(text: str) -> list[Finding]:
    """(line, what is wrong) of a source file, in order."""
    found: set[Finding] = set()
    for fn, _ in tree.functions(ast.parse(text)):
        for rule in (_advanced, _returned, _passed_on, _successor, _atom, _self_state, _tail):
            found.update(rule(fn))
    return sorted(found)


def _own(fn: tree.FunctionNode) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions defined in it."""
    stack: list[ast.AST] = list(fn.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _stored(node: ast.AST) -> set[str]:
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _named(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _locals(fn: tree.FunctionNode) -> set[str]:
    return {
        name
        for n in _own(fn)
        if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.withitem))
        for name in _stored(n)
    }


def _params(fn: tree.FunctionNode) -> set[str]:
    a = fn.args
    return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x}


def _method_calls(fn: tree.FunctionNode, names: set[str]) -> Iterator[ast.Call]:
    for n in _own(fn):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in names:
            yield n


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) of an assignment, tuples taken apart."""
    for target in node.targets:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        if both and len(target.elts) == len(node.value.elts):
            yield from zip(target.elts, node.value.elts)
        else:
            yield target, node.value


def _made(fn: tree.FunctionNode, makers: set[str]) -> dict[str, int]:
    """Names bound to what a maker returned, with the line."""
    made = {}
    for n in _own(fn):
        if isinstance(n, ast.Assign):
            for target, value in _pairs(n):
                call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                if call and value.func.attr in makers:
                    made.update(dict.fromkeys(_stored(target), n.lineno))
    return made


def _given_back(fn: tree.FunctionNode) -> set[str]:
    """Names in what the function returns."""
    return {
        name
        for n in _own(fn)
        if isinstance(n, ast.Return) and n.value is not None
        for name in _named(n.value)
    }


def _advanced(fn: tree.FunctionNode) -> Iterator[Finding]:
    local = _locals(fn) | (_params(fn) & _given_back(fn))
    for call in _method_calls(fn, ADVANCING):
        who = call.func.value
        if not (isinstance(who, ast.Name) and who.id in local):
            yield (
                call.lineno,
                f"{ast.unparse(who)} is not a local name: "
                f"the DSL would not carry its state through the loop",
            )


def _returned(fn: tree.FunctionNode) -> Iterator[Finding]:
    """Ends unpacked from a parameter are advanced here, so they must go back."""
    params = _params(fn)
    from_params = {
        name
        for n in _own(fn)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name) and n.value.id in params
        for name in _stored(n)
    }
    for call in _method_calls(fn, ADVANCING):
        who = call.func.value
        if isinstance(who, ast.Name) and who.id in from_params - _given_back(fn):
            yield call.lineno, f"{who.id} came in by a parameter and is advanced, but not returned"


def _passed_on(fn: tree.FunctionNode) -> Iterator[Finding]:
    """An end handed to another function is rebound from what it returns."""
    ends = set(_made(fn, MAKERS_PRODUCER | MAKERS_CONSUMER))
    ends |= {
        call.func.value.id
        for call in _method_calls(fn, ADVANCING)
        if isinstance(call.func.value, ast.Name)
    }
    rebound = {
        id(n.value): set().union(*(_stored(t) for t in n.targets))
        for n in _own(fn)
        if isinstance(n, ast.Assign)
    }
    leaving = {
        id(inner)
        for n in _own(fn)
        if isinstance(n, ast.Return) and n.value is not None
        for inner in ast.walk(n.value)
    }
    for n in _own(fn):
        if not isinstance(n, ast.Call) or id(n) in leaving:
            continue
        passed = set()
        for arg in (*n.args, *(k.value for k in n.keywords)):
            items = arg.elts if isinstance(arg, (ast.Tuple, ast.List)) else [arg]
            passed |= {i.id for i in items if isinstance(i, ast.Name) and i.id in ends}
        for name in sorted(passed - rebound.get(id(n), set())):
            yield (
                n.lineno,
                f"{name} goes to {ast.unparse(n.func)}, whose result is not bound to {name}",
            )


def _successor(fn: tree.FunctionNode) -> Iterator[Finding]:
    bound = {
        id(value): _stored(target)
        for n in _own(fn)
        if isinstance(n, ast.Assign)
        for target, value in _pairs(n)
    }
    for call in _method_calls(fn, SUCCESSORS):
        who = call.func.value
        named = isinstance(who, ast.Name) and "sched" in who.id
        if named and who.id not in bound.get(id(call), set()):
            yield call.lineno, f"{who.id}.{call.func.attr}() is a new value; bind it to {who.id}"


def _atom(fn: tree.FunctionNode) -> Iterator[Finding]:
    atoms = set(_made(fn, ATOM_MAKERS))
    for call in _method_calls(fn, {"set"}):
        field = ast.unparse(call.args[0]) if call.args else ""
        who = call.func.value
        if field.endswith(".ACCUMULATE") and not (isinstance(who, ast.Name) and who.id in atoms):
            yield (
                call.lineno,
                f"{ast.unparse(who)} was not made in this function: ACCUMULATE is state of the "
                "atom",
            )


def _self_state(fn: tree.FunctionNode) -> Iterator[Finding]:
    decorators = {ast.unparse(d) for d in fn.decorator_list}
    if not decorators & {"cute.jit", "cute.kernel"}:
        return
    for n in _own(fn):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
            root = n.value
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id == "self":
                yield n.lineno, f"{ast.unparse(n)} is assigned in a traced function; state is local"


def _tail(fn: tree.FunctionNode) -> Iterator[Finding]:
    ended = {
        call.func.value.id
        for call in _method_calls(fn, {"tail"})
        if isinstance(call.func.value, ast.Name)
    }
    for name, line in _made(fn, MAKERS_PRODUCER).items():
        if name not in ended:
            yield line, f"producer {name} never ends with {name}.tail()"
