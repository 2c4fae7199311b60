"""Commands of scripts, as bash would have them, where running is not needed to tell."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.shell.script import MAX_STATEMENTS, Script, read_script
from rlplan.foreign.unknown import is_known, strip_marks


def read(folder: Path, text: str, **variables: str) -> Script:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, variables)


def words(folder: Path, text: str, **variables: str) -> list[str]:
    """The arguments of the one command named `run`."""
    (result,) = [command.words for command in read(folder, text, **variables).commands if command.words[0] == "run"]
    return list(result[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=7\nrun $A ${A} a$A", ["7", "7", "a7"]),
        ('A="x y"\nrun $A "$A" \'$A\'', ["x", "y", "x y", "$A"]),
        ("run ${A:-5} ${A-6}", ["5", "6"]),
        (': "${A:=5}"\nrun $A', ["5"]),
        ('B=3\nrun ${A:-"${B}/b"}', ["3/b"]),
        ("A=1\nrun ${A:-5} ${A:+yes}", ["1", "yes"]),
        ("run $((2 * 1024)) $(( (1 + 2) * 3 - 10 % 4 ))", ["2048", "7"]),
        ("P=512\nR=$((1024*3))\nrun $((P + R)) $(((P+R)*2)) $((-7 / 2))", ["3584", "7168", "-3"]),
        ("run $((2**10)) $((1 << 4)) $((3 > 2 ? 8 : 9))", ["1024", "16", "8"]),
        ("A=3\nrun ${B:-$((A + 2048))} x${B:-$(( ${A:-2} * 2 ))}", ["2051", "x6"]),
        ('A=3\nB="${B:-$((A * 2))}"\nrun $B', ["6"]),
        ("A=(--a 1)\nA+=(--b 'x y')\nrun \"${A[@]}\" ${A[1]} ${#A[@]}", ["--a", "1", "--b", "x y", "1", "4"]),
        ("run a \\\n  b \\\n  c", ["a", "b", "c"]),
        ("A=(--a 1\n  # --b $B\n  --c 2 # two\n)\nrun ${A[@]} # all", ["--a", "1", "--c", "2"]),
        ("export A=1 B=2\ndeclare -x C=3\nrun $A$B$C", ["123"]),
        ("A=a\nA+=b\nrun $A", ["ab"]),
        ("A=org/model-7B\nrun ${A##*/} ${A%/*} ${A//-/_}", ["model-7B", "org", "org/model_7B"]),
        ('A=1\nrun "[$A $A]"', ["[1 1]"]),
        ('run x "$@" y', ["x", "y"]),
        ("X=1 Y=2 run a", ["a"]),
        ("run a 2>&1 | tee log.txt", ["a"]),
        ('run \'{"a": 1}\' "{\\"b\\": 2}"', ['{"a": 1}', '{"b": 2}']),
        ('A=vllm\nif [ "$A" = "vllm" ]; then B=1; else B=2; fi\nrun $B', ["1"]),
        ("A=3\nif [[ $A -gt 4 ]]; then B=1; elif [[ $A -eq 3 ]]; then B=2; fi\nrun $B", ["2"]),
        ('if [ -z "$A" ]; then A=unset; fi\nrun $A', ["unset"]),
        ("A=1\n[[ $A == 1 ]] && B=yes\n[[ $A == 2 ]] || C=no\nrun $B $C", ["yes", "no"]),
        ("A=b\ncase $A in a) B=1;; b|c) B=2;; *) B=3;; esac\nrun $B", ["2"]),
        ("f() { local n=$1; run $n $2; }\nf 3 4", ["3", "4"]),
        ("for i in 1 2; do A+=$i; done\nrun $A", ["12"]),
        ('A=1\nsrun -N 2 bash -c "cd /x && run $A \\"b c\\"" > log', ["1", "b c"]),
        ("A=3\nread -r -d '' T <<EOF\n--a $A \\\n  --b \"x\"\nEOF\nrun $T", ["--a", "3", "--b", '"x"']),
        ("U=$(cat <<'EOF'\nq $A\nEOF\n)\nrun $U", ["q", "$A"]),
        ('if [[ ${1} != "slurm" ]]; then A=1; fi\nrun $A', ["1"]),
        ("docker run --gpus all image sh -lc 'run 1'", ["1"]),
        (
            "A=/t/b/x.sh\nrun $(basename $A .sh) $(echo $A | sed 's#/t/b#/c#') $(echo aa|sed s/a/b/g)",
            ["x", "/c/x.sh", "bb"],
        ),
    ],
)
def test_words_are_what_bash_makes_of_them(text: str, expected: list[str], tmp_path: Path) -> None:
    assert words(tmp_path, text) == expected


def test_what_only_running_would_tell_stays_in_the_word_by_its_own_text(tmp_path: Path) -> None:
    result = words(tmp_path, "NOW=$(date +%Y)\nrun name-$NOW $HOME/models $((N * 2))")
    assert [strip_marks(word) for word in result] == ["name-$(date +%Y)", "$HOME/models", "$((N * 2))"]
    assert not any(map(is_known, result))


def test_the_output_of_a_program_is_not_its_here_document_and_not_empty(tmp_path: Path) -> None:
    script = read(tmp_path, "A=$(python3 - <<'EOF'\nprint(1)\nEOF\n)\nif [ -n \"$A\" ]; then run 1; fi\nrun $A")
    (command,) = script.commands
    assert not is_known(command.words[1])
    assert script.notes == ['run.sh:5: taken as false, because it is known only at run time: [ -n "$A" ]']


def test_a_sourced_file_beside_the_script_is_read_and_another_is_noted(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("ARGS=(--layers 24)\n")
    text = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${DIR}/models/small.sh"\n. ./no.sh\n'
    script = read(tmp_path, text + 'run "${ARGS[@]}"')
    assert script.commands[-1].words == ("run", "--layers", "24")
    assert script.notes == ["run.sh:3: './no.sh' was not found beside the script and not read"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    read(tmp_path, f"touch {tmp_path}/a\nA=$(touch {tmp_path}/b)\n`touch {tmp_path}/c`\ncat <(touch {tmp_path}/d)")
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_variable_from_outside_wins(tmp_path: Path) -> None:
    assert words(tmp_path, "A=1\nrun $A ${B:-2}", A="7", B="8") == ["7", "8"]


def test_a_test_that_only_running_would_tell_is_false_and_noted(tmp_path: Path) -> None:
    script = read(tmp_path, "A=1\nif [ -f x ]; then A=2; fi\nwhile true; do A=3; done\nrun $A")
    assert script.commands[-1].words == ("run", "1")
    assert [note.partition(": ")[0] for note in script.notes] == ["run.sh:2", "run.sh:3"]


def test_each_word_knows_its_line(tmp_path: Path) -> None:
    (command,) = read(tmp_path, "run a \\\n  b=1 \\\n  c").commands
    assert command.places == ("run.sh:1", "run.sh:1", "run.sh:2", "run.sh:3")


@pytest.mark.parametrize(
    "text",
    ["f() { f; }\nf", "for i in $L; do for j in $L; do for k in $L; do run; done; done; done", "source run.sh"],
)
def test_a_script_without_an_end_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"more than {MAX_STATEMENTS:,} statements, or calls itself"):
        read(tmp_path, text, L=" ".join(map(str, range(40))))


@pytest.mark.parametrize(
    ("text", "what"), [('run "a"' + "\0" * 16_000, "a NUL"), ("run a" + ">" * 16_000, "16,000 red")]
)
def test_a_script_that_the_grammar_would_take_long_for_is_refused(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=what):
        read(tmp_path, text)


def test_arithmetic_of_a_thousand_levels_cannot_be_told(tmp_path: Path) -> None:
    assert not is_known(words(tmp_path, f"run $((2 * {'!' * 5_000}1))")[0])


def test_words_that_double_in_a_loop_stay_small(tmp_path: Path) -> None:
    script = read(tmp_path, "A=aaaaaaaaaa\nfor i in $L; do A=$A$A; done\nrun x$A", L=" ".join("1" * 60))
    assert len(script.commands[-1].words[1]) < 1 << 18


@pytest.mark.parametrize(
    ("data", "what"), [(b"\x7fELF\xff\xfe" * 100, "not UTF-8"), (b"a=1\n" * 3_000_000, "more than 1048576 bytes")]
)
def test_binaries_and_huge_files_are_refused(data: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_bytes(data)
    with pytest.raises(SpecError, match=what):
        read_script(tmp_path / "x.sh", {})


def test_what_is_no_bash_is_skipped_with_a_note(tmp_path: Path) -> None:
    script = read(tmp_path, "if then ((\nrun a\n")
    assert any("not bash" in note for note in script.notes)


@pytest.mark.parametrize("call", ["bash inner.sh 8", "./inner.sh 8", "sh -x inner.sh 8", "nohup bash ./inner.sh 8 &"])
def test_a_script_beside_that_is_started_is_read_with_its_arguments(call: str, tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text("run $1 $A\n")
    assert words(tmp_path, f"export A=2\n{call}") == ["8", "2"]


def test_arguments_of_a_script_hold_again_behind_another_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text("echo $1\n")
    assert words(tmp_path, "f() { bash inner.sh 8; run $1 $2; }\nf 3 4") == ["3", "4"]


def test_a_script_that_starts_itself_for_ever_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="calls itself"):
        read(tmp_path, "bash run.sh\n")


def test_tests_in_braces_are_joined_with_others(tmp_path: Path) -> None:
    text = 'A=x\nif [ "${U:-1}" != 0 ] && { [ "$A" = x ] || [ "$A" = y ]; }; then B=1; fi\nrun $B\n'
    assert words(tmp_path, text) == ["1"]


@pytest.mark.parametrize(("num_gpus", "expected"), [("8", "2"), ("4", "1")])
def test_a_test_of_numbers_is_computed(num_gpus: str, expected: str, tmp_path: Path) -> None:
    text = "SP=1\n(( N % 4 == 0 && N > 4 )) && SP=2\nif (( N < 0 || N % 3 == 5 )); then SP=9; fi\nrun $SP\n"
    result = read(tmp_path, f"N={num_gpus}\n{text}")
    assert (result.commands[-1].words, result.notes) == (("run", expected), [])


def test_a_value_behind_a_test_that_only_running_would_decide_is_taken_with_a_note(tmp_path: Path) -> None:
    result = read(tmp_path, "SP=1\n[[ $(nvidia-smi -L | wc -l) -ge 8 ]] && SP=2\nrun $SP\n")
    assert result.commands[-1].words == ("run", "2")
    assert any("taken as true, because it is known only at run time" in note for note in result.notes)
    decided = read(tmp_path, "SP=1\n[[ 4 -ge 8 ]] && SP=2\nrun $SP\n")
    assert (decided.commands[-1].words, decided.notes) == (("run", "1"), [])


@pytest.mark.parametrize("test", ['[ "$NODE_RANK" -eq 0 ]', "[[ ${NODE_RANK} -eq 0 ]]"])
def test_a_script_of_several_nodes_is_read_as_on_the_first_one(tmp_path: Path, test: str) -> None:
    result = read(tmp_path, f"NODE_RANK=$2\nif {test}; then\n  run a\nelse\n  run b\nfi")
    assert [command.words for command in result.commands] == [("run", "a")]
    assert any("taken as true, as on the first node" in note for note in result.notes)
    assert words(tmp_path, f"if {test}; then\n  run a\nelse\n  run b\nfi", NODE_RANK="1") == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        'N=4\nCOMMAND="run a=$N b" CONTAINER=x sbatch --nodes=4 ray.sub\n',
        'N=4\nCOMMAND="run a=${N} b"\nsbatch ray.sub\n',
    ],
)
def test_what_a_job_of_slurm_is_handed_as_its_command_is_read(text: str, tmp_path: Path) -> None:
    """`ray.sub` of NeMo-RL runs the text of COMMAND on the first node, by its page on clusters."""
    assert words(tmp_path, text) == ["a=4", "b"]


def test_a_script_for_several_devices_is_read_as_on_gpus(tmp_path: Path) -> None:
    test = '[ -n "$device_name" ] && [ "$device_name" == "cuda" ]'
    result = read(tmp_path, f"device_name=$(python3 -c x)\nif {test}; then\n  run a\nelse\n  run b\nfi")
    assert [command.words for command in result.commands] == [("run", "a")]
    assert any("taken as true, as on a GPU" in note for note in result.notes)
    npu = test.replace("cuda", "npu")
    other = read(tmp_path, f"device_name=$(python3 -c x)\nif {npu}; then\n  run a\nelse\n  run b\nfi")
    assert [command.words for command in other.commands] == [("run", "b")]
