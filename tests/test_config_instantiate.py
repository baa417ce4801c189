"""Building objects from targets, and what is said when a target is wrong."""

import functools
import sys

import pytest

from raytrainer.config import (
    Config,
    add_importable,
    callable_from,
    check_target,
    importable,
    instantiate,
    locate,
    takes,
)
from raytrainer.config.section import EnvText
from raytrainer.errors import DataError, TargetError

MODULE = """
class Net:
    def __init__(self, width, depth=2, *, inner=None):
        self.width, self.depth, self.inner = width, depth, inner

    @classmethod
    def small(cls, depth=1):
        return cls(1, depth)

class Open:
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

def add(a, b=1):
    return a + b

def fail(why="no reason"):
    helper(why)

def helper(why):
    raise RuntimeError(why)

def leave():
    raise SystemExit(3)

number = 7
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    """A module `rt_user` in a folder that is importable, and others that fail when they are imported."""
    (tmp_path / "rt_user.py").write_text(MODULE)
    (tmp_path / "rt_syntax.py").write_text("x = (1,\n")
    (tmp_path / "rt_missing.py").write_text("import rt_no_such_thing\n")
    (tmp_path / "rt_raises.py").write_text("value = 1\nraise ValueError('at import')\n")
    (tmp_path / "rt_exits.py").write_text("import sys\nsys.exit(4)\n")
    (tmp_path / "rt_package").mkdir()
    (tmp_path / "rt_package" / "__init__.py").write_text("from .inner import Thing\n")
    (tmp_path / "rt_package" / "inner.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("rt_")]:
        del sys.modules[name]


def test_keywords_and_nested_targets_anywhere():
    net = instantiate(
        {
            "_target_": "rt_user.Net",
            "width": 3,
            "inner": {
                "a": [{"_target_": "rt_user.Net", "width": 1}, 2],
                "b": {"_target_": "rt_user.add", "a": 1},
            },
        }
    )
    assert (net.width, net.depth) == (3, 2)
    assert net.inner["a"][0].width == 1
    assert net.inner["a"][1] == 2
    assert net.inner["b"] == 2


def test_arguments_of_the_caller_come_first_and_win():
    made = instantiate({"_target_": "rt_user.Open", "_args_": [2], "x": 1, "y": 2}, 1, y=3, at="model")
    assert made.args == (1, 2)
    assert made.kwargs == {"x": 1, "y": 3}


def test_partial_binds_and_does_not_call():
    add = instantiate({"_target_": "rt_user.add", "_partial_": True, "b": 5})
    assert isinstance(add, functools.partial)
    assert add(1) == 6
    with pytest.raises(TargetError, match="takes no keyword c"):
        instantiate({"_target_": "rt_user.add", "_partial_": True, "c": 5})


def test_class_methods_submodules_and_packages_are_found():
    assert instantiate({"_target_": "rt_user.Net.small", "depth": 4}).depth == 4
    assert locate("rt_package.inner.Thing") is locate("rt_package.Thing")
    assert locate("os.path.join") is __import__("os").path.join


def test_objects_from_python():
    class Made:
        def __init__(self, x=1):
            self.x = x

    made = Made()
    assert instantiate(made) is made
    assert instantiate(Made).x == 1
    assert instantiate(Made, 5).x == 5
    assert instantiate(len) is len
    assert instantiate(len, "abc") == 3
    assert instantiate(None) is None


def test_a_value_from_the_environment_becomes_an_ordinary_text():
    made = instantiate(
        {"_target_": "rt_user.Open", "a": EnvText("x", "${oc.env:A}"), "b": [EnvText("y", "raw")]}
    )
    assert type(made.kwargs["a"]) is str
    assert type(made.kwargs["b"][0]) is str


BAD_TARGETS = [
    ("rt_user.Nett", {}, ["model: ", "rt_user has no Nett", "did you mean rt_user.Net?"]),
    ("rt_usr.Net", {}, ["there is no module rt_usr", "did you mean rt_user?"]),
    ("zzqqxx.Net", {}, ["there is no module zzqqxx", "your own modules are looked for in"]),
    ("rt_user.deep.Net", {}, ["rt_user has no deep"]),
    ("rt_user.Net.smal", {}, ["rt_user.Net has no smal", "did you mean rt_user.Net.small?"]),
    ("rt_package.iner.Thing", {}, ["rt_package has no iner", "did you mean rt_package.inner?"]),
    ("rt_user.number", {}, ["model: rt_user.number cannot be called: its type is int"]),
    ("rt_package.inner", {}, ["cannot be called: its type is module"]),
    ("rt_syntax.Net", {}, ["importing rt_syntax.Net raised SyntaxError", "rt_syntax.py"]),
    (
        "rt_missing.Net",
        {},
        ["raised ModuleNotFoundError: No module named 'rt_no_such_thing'", "rt_missing.py:1"],
    ),
    ("rt_raises.Net", {}, ["raised ValueError: at import", "rt_raises.py:2"]),
    ("rt_exits.Net", {}, ["raised SystemExit: 4", "rt_exits.py:2"]),
    ("rt_user.Net", {"widht": 3}, ["model.widht: rt_user.Net takes no keyword widht", "did you mean width?"]),
    ("rt_user.Net", {"width": 1, "colour": 3}, ["model.colour", "it takes: width, depth, inner"]),
    ("rt_user.Net", {"depth": 3}, ["model: rt_user.Net needs width", "write width: ..., or _partial_: true"]),
    ("rt_user.add", {"_args_": [1, 2, 3]}, ["cannot be called with these arguments", "too many positional"]),
]


@pytest.mark.parametrize(("name", "keywords", "words"), BAD_TARGETS)
@pytest.mark.parametrize("function", [instantiate, check_target])
def test_a_wrong_target_is_named_with_its_place(function, name, keywords, words):
    with pytest.raises(TargetError) as caught:
        function({"_target_": name, **keywords}, at="model")
    told = str(caught.value)
    assert all(word in told for word in words), told


@pytest.mark.parametrize("function", [instantiate, check_target])
def test_the_place_of_a_nested_target_is_its_whole_path(function):
    target = {"_target_": "rt_user.Open", "layers": [{"_target_": "rt_user.Net", "width": 1, "dept": 2}]}
    with pytest.raises(TargetError, match=r"^model\.layers\.0\.dept: rt_user\.Net takes no keyword dept"):
        function(target, at="model")


def test_what_a_target_raises_is_told_with_the_users_frames_and_its_cause():
    with pytest.raises(TargetError) as caught:
        instantiate({"_target_": "rt_user.fail", "why": "too small"}, at="data.train")
    told = str(caught.value)
    assert "data.train: _target_ rt_user.fail: calling it raised RuntimeError: too small" in told
    assert "rt_user.py:18 in fail: helper(why)" in told
    assert "rt_user.py:21 in helper: raise RuntimeError(why)" in told
    assert "instantiate.py" not in told
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_errors_of_our_own_and_exits_pass_through():
    def refuse():
        raise DataError("empty")

    with pytest.raises(DataError, match="empty"):
        instantiate(type("Empty", (), {"__init__": lambda self: refuse()}))
    with pytest.raises(SystemExit):
        instantiate({"_target_": "rt_user.leave"})


def test_check_target_imports_and_binds_but_calls_nothing():
    check_target({"_target_": "rt_user.fail", "why": "x"})
    check_target({"_target_": "rt_user.Net", "depth": 1}, "width from the caller")
    check_target(object())
    with pytest.raises(TargetError, match="needs width"):
        check_target({"_target_": "rt_user.Net"})


def test_callable_from_a_name_a_target_or_itself():
    assert callable_from("rt_user.add")(1) == 2
    assert callable_from({"_target_": "rt_user.add", "_partial_": True, "b": 3})(1) == 4
    assert callable_from(len) is len
    assert callable_from(None) is None
    with pytest.raises(TargetError, match=r"rt_user\.number cannot be called: its type is int"):
        callable_from("rt_user.number", at="data.collate_fn")
    with pytest.raises(TargetError, match=r"data\.collate_fn: cannot be called: its type is Net"):
        callable_from({"_target_": "rt_user.Net", "width": 1}, at="data.collate_fn")


def test_takes_asks_the_signature():
    assert takes({"_target_": "rt_user.Net"}, "depth")
    assert not takes({"_target_": "rt_user.Net"}, "total_steps")
    assert takes(lambda optimizer, total_steps: None, "total_steps")
    assert not takes(3, "x")


def test_the_yaml_files_folder_and_the_working_directory_are_importable(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        "name: x\ndata: {train: {_target_: a.B}, global_batch_size: 1}\n"
        "model: {_target_: a.B}\nloss: {_target_: a.B}\n"
    )
    (folder / "rt_beside.py").write_text("class Net: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    from raytrainer.config import load_config

    config = load_config("configs/a.yaml")
    assert importable(config) == [str(tmp_path), str(folder)]
    add_importable(config)
    add_importable(config)
    assert sys.path[:2] == [str(tmp_path), str(folder)]
    assert sys.path.count(str(folder)) == 1
    assert instantiate({"_target_": "rt_beside.Net"}).__class__.__name__ == "Net"
    plain = Config.from_mapping(
        {
            "name": "x",
            "data": {"train": object(), "global_batch_size": 1},
            "model": object(),
            "loss": object(),
        }
    )
    assert importable(plain) == [str(tmp_path)]
