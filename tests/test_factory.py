import functools
import json
import math
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from plait.errors import FileError, UsageError
from plait.factory import Factory, load_file, name_of

HERE = Path(__file__)


def multiply(a, *, b=2):
    return a * b


class Scale:
    def __init__(self, factor=3):
        self.factor = factor

    def apply(self, x):
        return x * self.factor

    @classmethod
    def by_ten(cls):
        return cls(10)


hidden = multiply


def multiply(a, *, b=5):  # hides the first, on purpose
    return a * b


def found(value):
    return Factory.of(value, setting="model")


def test_a_function_is_found_again_by_its_name():
    factory = found(multiply)
    assert factory.target.endswith(":multiply")
    assert factory.load(setting="model")(4) == 20


@pytest.mark.parametrize("value", ["math:hypot", math.hypot, Factory("math:hypot")])
def test_name_function_and_factory_are_the_same(value):
    assert found(value) == Factory("math:hypot")
    assert found(value).load(setting="model")(3, 4) == 5


def test_arguments_come_with_a_partial_or_a_factory():
    for factory in (found(functools.partial(multiply, b=7)), Factory(multiply, b=7)):
        assert factory.arguments == {"b": 7}
        assert factory.load(setting="model")(2) == 14
    assert hash(Factory("m:f", a=1, b=2)) == hash(Factory("m:f", b=2, a=1))


def test_classes_and_class_methods_are_functions_too():
    assert found(Scale).load(setting="model")(4).factor == 4
    assert found(Scale.by_ten).load(setting="model")().factor == 10
    assert found(OrderedDict).target == "collections:OrderedDict"


def test_it_goes_through_json_as_it_is():
    factory = Factory("m:f", sizes=(1, 2), inner={"a": None})
    assert Factory.of(json.loads(json.dumps(factory.plain())), setting="model") == factory


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 1, "a lambda has no name"),
        (functools.partial(lambda: 1), "a lambda has no name"),
        (Scale(2).apply, "Scale.apply is bound to an object"),
        (hidden, "multiply is not what its module holds"),
        (Scale(2), "a Scale object has no name"),
        (5, "a int object has no name"),
        (functools.partial(multiply, 3), "a partial of 1 positional arguments"),
        ("multiply", "'multiply' does not name a function"),
        ("a module:multiply", "does not name a function"),
        ("module:", "does not name a function"),
        (":function", "does not name a function"),
        ("module:a-b", "does not name a function"),
        ({"call": "math:hypot"}, "is not a call"),
        ({"call": 5, "arguments": {}}, "is not a call"),
    ],
)
def test_what_workers_could_not_import_is_refused_with_the_setting(value, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        found(value)
    assert caught.value.setting == "model"
    assert caught.value.works


def test_a_function_inside_a_function_is_refused():
    def local():
        return 1

    with pytest.raises(UsageError, match=r"local is defined inside a function"):
        found(local)


@pytest.mark.parametrize("value", [object(), {1, 2}, math.nan, b"x"])
def test_arguments_that_json_cannot_hold_are_refused(value):
    with pytest.raises(UsageError, match=r"argument b=.* cannot be written as JSON") as caught:
        Factory("m:f", a=1, b=value)
    assert caught.value.setting == "b"


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Factory("no_such_module:f"), "no_such_module:f cannot be imported: No module named"),
        (Factory("math:no_such"), "math has no 'no_such'"),
        (Factory("math:pi"), "math:pi is a float, not a function"),
        (Factory("/no/such/file.py:f"), "there is no Python file /no/such/file.py"),
        (Factory(multiply, c=1), "takes no argument 'c'"),
        (Factory("json:dumps"), None),
    ],
)
def test_a_name_that_leads_nowhere_is_told_when_it_is_loaded(factory, reason):
    if reason is None:  # takes anything, so anything goes
        assert factory.load(setting="data")([1]) == "[1]"
        return
    with pytest.raises((UsageError, FileError), match=reason) as caught:
        factory.load(setting="data")
    assert caught.value.setting in ("data", "path")


@pytest.mark.parametrize(
    ("factory", "given", "reason"),
    [
        (Factory(multiply), (), r"multiply\(a, b\) is called with \(\): missing a required argument: 'a'"),
        (Factory(multiply, a=2), ("x",), r"is called with \(x\): multiple values for argument 'a'"),
        (Factory(multiply), ("x", "y"), r"is called with \(x, y\): too many positional arguments"),
    ],
)
def test_what_it_will_be_called_with_must_fit(factory, given, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        factory.load(setting="data", given=given)
    assert caught.value.setting == "data"
    assert f"a function of ({', '.join(given)})" in caught.value.works
    factory.load(setting="data")


def test_what_an_argument_may_be_is_listed():
    with pytest.raises(UsageError, match="one of: a, b"):
        Factory(multiply, c=1).load(setting="data")


def run(tmp_path, *command):
    source = Path(sys.modules["plait"].__file__).parents[1]
    environment = {"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )


SCRIPT = """
from plait.factory import Factory
import beside

def double(x):
    return beside.two * x

if __name__ == "__main__":
    print(Factory(double).target)
    assert Factory(double).load(setting="x").func is double, "the script would be run a second time"
"""


def test_a_function_of_a_script_goes_by_the_path_of_the_script(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").write_text("two = 2")
    (folder / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "folder/script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{folder / 'script.py'}:double"
    assert Factory(done.stdout.strip()).load(setting="model")(21) == 42
    assert load_file(folder / "script.py") is load_file(str(folder / "script.py"))


def test_a_function_of_a_module_run_as_a_script_goes_by_the_name_of_the_module(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "beside.py").write_text("two = 2")
    (package / "script.py").write_text(SCRIPT.replace("import beside", "from package import beside").replace(
        "    assert", "    # assert"))  # fmt: skip
    done = run(tmp_path, "-m", "package.script")
    assert done.stdout.strip() == "package.script:double", done.stderr


def test_a_function_typed_in_cannot_travel(tmp_path):
    done = run(tmp_path, "-c", "from plait.factory import Factory\ndef f(): pass\nFactory(f)")
    assert "__main__ is not in a file, so workers cannot import from it" in done.stderr


def test_a_file_that_fails_is_not_kept_half_loaded(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("x = 1\nraise RuntimeError('no')")
    with pytest.raises(FileError, match=r"broken\.py, line 2: RuntimeError: no") as caught:
        load_file(file)
    assert isinstance(caught.value.__cause__, RuntimeError)
    file.write_text("x = 2")
    assert load_file(file).x == 2


def test_a_file_that_fails_elsewhere_is_named_with_its_own_line(tmp_path):
    (tmp_path / "plait_test_wrong.py").write_text("\n\n1 +")
    (tmp_path / "outer.py").write_text("x = 1\nimport plait_test_wrong")
    with pytest.raises(FileError, match=r"outer\.py, line 2: SyntaxError: .*plait_test_wrong\.py, line 3"):
        load_file(tmp_path / "outer.py")
    # As a module by name, it is the setting's value that cannot be used.
    with pytest.raises(UsageError, match="plait_test_wrong:f cannot be imported: SyntaxError") as caught:
        found("plait_test_wrong:f").load(setting="model")
    assert caught.value.setting == "model"


def test_an_error_of_plaits_own_in_a_file_stays_what_it_is(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from plait.units import parse_bytes\nparse_bytes('much', setting='memory')")
    with pytest.raises(UsageError, match="'much' is not a size") as caught:
        load_file(file)
    assert caught.value.setting == "memory"


def test_a_script_with_a_command_line_is_loaded_with_none(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plait", "profile", "--json"])
    parse = "import argparse, sys\nargv = sys.argv\nparser = argparse.ArgumentParser()\n"
    file = tmp_path / "script.py"
    file.write_text(f"{parse}parser.add_argument('--steps', default=3)\nargs = parser.parse_args()")
    assert load_file(file).argv == [str(file)]
    assert load_file(file).args.steps == 3
    file = tmp_path / "needs.py"
    file.write_text(f"{parse}parser.add_argument('data')\nargs = parser.parse_args()")
    with pytest.raises(
        FileError, match=r"needs\.py, line 5: it ended the interpreter \(exit code 2\)"
    ) as caught:
        load_file(file)
    assert caught.value.works.endswith("if __name__ == '__main__'")
    assert sys.argv == ["plait", "profile", "--json"]


def test_leaving_is_no_failure_of_a_file(tmp_path):
    file = tmp_path / "leaving.py"
    file.write_text("raise SystemExit(143)")
    with pytest.raises(SystemExit):
        load_file(file)


def test_a_name_is_the_modules_where_a_fresh_process_finds_it_and_else_the_files():
    from plait import units

    assert name_of(units.parse_bytes) == "plait.units:parse_bytes"
    place = name_of(Scale).rpartition(":")[0]
    assert place in (str(HERE.resolve()), Scale.__module__)
