"""Hostile files by name: each is small, and asks its reader for far more time or memory than a file may take.

Written as an attacker would: every operator, builtin, method, expansion and construct that can make much of little.
"""

from collections.abc import Iterator

TRAINER = "from trl import GRPOConfig, GRPOTrainer\n"
"""So that the script is read on: the last line creates a trainer."""
_END = "\nargs = GRPOConfig(learning_rate=1e-6, num_generations=8)\n"
_START = "\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b data.train_batch_size=$N\n"
NEAR_MIB = 1_000_000
"""Bytes of the largest ones: readers take files up to 1 MiB."""

PYTHON = {
    "range below zero": "x = range(-10**8, 0)\nfor i in x: y = i\n",
    "range with a step": "x = list(range(0, 10**15, 3))\n",
    "range of a name": "n = 1 << 59\nx = list(range(n))\n",
    "round to few digits": "x = round(7, -3 * 10**7)\n",
    "round to many digits": "x = round(0.5, 10**9)\n",
    "power of powers": "x = 9 ** 9 ** 9 ** 9\n",
    "repeated squares": "x = 10\n" + "x = x ** 2\n" * 60,
    "repeated products": "x = 1 << 59\n" + "x = x * x\n" * 60,
    "a long shift": "x = 1 << 10**12\n",
    "a product of text": "x = 'a' * 10**10\n",
    "a product of bytes": "x = b'a' * 10**10\n",
    "a product of a list": "x = [0] * 10**10\n",
    "a product of a tuple": "x = (1, 2) * 10**10\n",
    "doubled text": "x = 'aaaaaaaa'\n" + "x = x + x\n" * 60,
    "doubled bytes": "x = b'aaaaaaaa'\n" + "x = x + x\n" * 60,
    "doubled tuple": "x = tuple([1, 2])\n" + "x = x + x\n" * 60,
    "doubled constant tuple": "x = (1, 2)\n" + "x += x\n" * 60,
    "doubled list": "x = [1, 2]\n" + "x += x\n" * 60,
    "doubled in a loop": "x = [1]\nfor i in range(1900):\n    x = x + x\n",
    "doubled by extend": "x = [1]\nfor i in range(1900):\n    x.extend(x)\n",
    "doubled by starred arguments": "def f(*a): return list(a)\nx = [1, 2]\n" + "x = f(*x, *x)\n" * 60,
    "nested doubling": "x = [1]\n" + "x = [x, x]\n" * 900,
    "nested mappings": "x = {}\n" + "x = {'a': x, 'b': x}\n" * 900,
    "a list in itself": "x = []\n" + "x.append(x)\n" * 50 + "y = str(x)\n",
    "format of bytes": "x = b'%1000000000d' % 1\n",
    "format of text": "x = '%1000000000d' % 1\n",
    "format method": "x = '{:>1000000000}'.format(1)\n",
    "format of an f-string": "x = f'{1:>1000000000}'\n",
    "a long f-string": "a = 'x' * 1\n" + "a = a + a\n" * 13 + "x = f'" + "{a}" * 75_000 + "'\n",
    "f-strings of f-strings": "a = 'xxxxxxxxxx'\n" + "a = f'{a}{a}{a}{a}{a}{a}{a}{a}'\n" * 30,
    "text of a list": "a = 'x' * 1\nx = [" + "'" + "y" * 9000 + "', " * 1 + "]\n" + "z = str(x)\n" * 5_000,
    "text of a large list in a loop": (
        "b = ['" + "y" * 9000 + "']\nx = []\nfor i in range(1900):\n    x = x + b\n    y = str(x)\n"
    ),
    "text of shared long texts": "t = '" + "y" * 9900 + "'\nx = [" + "t," * 9000 + "]\n" + "y = str(x)\n" * 500,
    "join of a list": "x = ','.join(['a' * 10] * 10**9)\n",
    "replace": "x = 'a'.replace('a', 'b' * 10**9)\n",
    "ljust": "x = 'a'.ljust(10**10)\n",
    "expandtabs": "x = '\\t'.expandtabs(10**10)\n",
    "a long hexadecimal": f"x = 0x{'f' * 100_000}\n",
    "many long hexadecimals": f"x = 0x{'f' * 10_000}\n" * 20,
    "sums of long hexadecimals": f"x = 0x{'f' * 100_000} + 0x{'f' * 100_000} * 0x{'e' * 22_500}\n",
    "an argument of long hexadecimals": f"x = f(0x{'f' * 100_000})(1)(2)(3)(4)\n",
    "a long octal": f"x = -0o{'7' * 225_000}\n",
    "a long decimal": f"x = {'9' * 225_000}\n",
    "int of long text": f"x = int('{'9' * 9_900}')\n" * 29,
    "int of a base": f"x = int('{'z' * 9_900}', 36)\n" * 29,
    "float of long text": f"x = float('{'9' * 9_900}')\n" * 29,
    "one long sum": "x = " + "1 + " * 50_000 + "1\n",
    "one long product of names": "x = " + "a * " * 50_000 + "1\n",
    "one long comparison": "x = " + "1 < " * 50_000 + "1\n",
    "one long call chain": "x = a" + ".b()" * 60 + "\n",
    "many call chains": ("x = a" + ".b()" * 60 + "\n") * 1_200,
    "calls in containers": "x = " + "f([" * 90 + "1" + "])" * 90 + "\n",
    "many calls in containers": ("x = " + "f({'a': [" * 28 + "1" + "]})" * 28 + "\n") * 850,
    "attributes of attributes": "x = a" + ".b" * 100_000 + "\n",
    "deep parentheses": "x = " + "(" * 25_000 + "1" + ")" * 25_000 + "\n",
    "deep lists": "x = " + "[" * 199 + "]" * 199 + "\n",
    "deep unary": "x = " + "-" * 50_000 + "1\n",
    "deep not": "x = " + "not " * 50_000 + "1\n",
    "deep lambda": "x = " + "lambda: " * 25_000 + "1\n",
    "deep ternary": "x = " + "1 if a else " * 20_000 + "1\n",
    "long elif": "if a: x = 1\n" + "elif a: x = 1\n" * 15_000,
    "many undecided branches": "".join(f"v{i} = {i}\n" for i in range(2_000)) + "if a: x = 1\nelse: x = 2\n" * 7_500,
    "many cases": "v = [0]\nmatch a:\n" + "".join(f"    case {i}: x = {i}\n" for i in range(9_000)),
    "cases of many names": (
        "".join(f"v{i} = {i}\n" for i in range(9_000))
        + "match a:\n"
        + "".join(f"    case {i}: x = {i}\n" for i in range(7_500))
    ),
    "nested branches": "".join(" " * i + f"if a{i}:\n" for i in range(90)) + " " * 91 + "x = 1\n",
    "nested branches with names": (
        "".join(f"v{i} = [{i}]\n" for i in range(5_000))
        + "".join(" " * i + f"if a{i}:\n" for i in range(90))
        + " " * 91
        + "x = 1\n"
    ),
    "aliases of a list in branches": (
        f"x = [{'0,' * 9_000}]\n" + "".join(f"v{i} = x\n" for i in range(3_000)) + "if a: y = 1\nelse: y = 2\n" * 9_000
    ),
    "a loop of nothing": "for i in range(1999):\n" + "    pass\n" * 22_500,
    "a loop of deletions": "for i in range(1999):\n    del " + ",".join(["x"] * 22_500) + "\n",
    "a loop of global names": (
        "def f():\n    for i in range(1999):\n        global " + ",".join(f"x{i}" for i in range(22_500)) + "\nf()\n"
    ),
    "nested loops": "".join(" " * i + f"for i{i} in range(1999):\n" for i in range(60)) + " " * 61 + "x = 1\n",
    "while true": "while True:\n    x = 1\n",
    "a recursive function": "def f(x): return f(x) + f(x)\nf(1)\n",
    "a recursive function with doubled arguments": "def f(*a): return f(*a, *a)\nf(1, 2)\n",
    "mutual recursion": "def f(x): return [g(x), g(x)]\ndef g(x): return [f(x), f(x)]\nf(1)\n",
    "many functions": "".join(f"def f{i}(): return f{i - 1}()\n" for i in range(1, 6_250)) + "f6249()\n",
    "functions beside configurations": "".join(f"def f{i}(): 0\nAConfig()\n" for i in range(6_250)),
    "calls among many names": (
        "".join(f"v{i} = {i}\n" for i in range(10_000)) + "def f(): return 1\n" + "f()\n" * 12_500
    ),
    "a chain of classes": "class C0: a0 = 0\n" + "".join(f"class C{i}(C{i - 1}): a{i} = 0\n" for i in range(1, 6_250)),
    "a class of many fields": "class C:\n" + "".join(f"    a{i}: int = 0\n" for i in range(11_250)),
    "compared lists": f"x = [{'1,' * 9_000}]\ny = [{'1,' * 9_000}]\n" + "z = x == y\n" * 20_000,
    "membership": f"x = [{'1,' * 9_000}]\n" + "z = 2 in x\n" * 20_000,
    "largest of a list": f"x = [{'1,' * 9_000}]\n" + "z = max(x)\n" * 20_000,
    "merged mappings": ("x = {" + ",".join(f"'{i}': 0" for i in range(4_000)) + "}\ny = {" + "**x," * 50_000 + "}\n"),
    "keyword mappings": (
        "x = {" + ",".join(f"'{i}': 0" for i in range(4_000)) + "}\ny = dict(" + "**x," * 50_000 + ")\n"
    ),
    "starred arguments": f"x = [{'1,' * 9_000}]\ndef f(*a): return 1\nf(" + "*x," * 50_000 + ")\n",
    "attributes of an object": "args = GRPOConfig()\n" + "".join(f"args.a{i} = {i}\n" for i in range(11_250)),
    "an object in itself": "a = GRPOConfig()\na.b = a\n" + "a.b.b.b.b.b.b = [a, a, a]\n" * 300,
    "objects in objects": "a = AConfig()\n" + "a = AConfig(x=a, y=a)\n" * 900,
    "an option for each word": "p = ArgumentParser()\n"
    + "".join(f"p.add_argument('--a{i}')\n" for i in range(5_000))
    + "p.parse_args()\n" * 9_000,
    "a comprehension": "x = [a for a in range(10**9) for b in range(10**9)]\n",
    "a comprehension of mappings": "x = {a: {b: 1 for b in range(10**9)} for a in range(10**9)}\n",
    "a generator": "x = sum(i for i in range(10**12))\n",
    "a product of iterators": "import itertools\nx = list(itertools.product(range(10**6), repeat=9))\n",
    "zip": "x = list(zip(*[range(10**9)] * 9))\n",
    "sorted": "x = sorted(range(10**9))\n",
    "bytearray": "x = bytearray(10**12)\n",
    "bytes of a number": "x = bytes(10**12)\n",
    "eval": "x = eval('9**9**9')\n",
    "exec": "exec('while 1: pass')\n",
    "an import": "import os\nos.system('touch sprung')\n__import__('os').system('touch sprung')\n",
    "a file": "open('sprung', 'w').write('x')\n",
    "a literal of text": "x = '" + "a" * 247_500 + "'\n",
    "a call of long texts": ("x = f('" + "a" * 9_000 + "')(1)(2)(3)(4)(5)(6)(7)(8)\n") * 30,
    "names of long words": "".join(f"{'a' * 9_000}{i} = b\n" for i in range(30)),
    "semicolons": "x=1;" * 60_000 + "\n",
    "many decorators": "@a\n" * 22_500 + "def f(): pass\n",
    "magic lines": "x = !" + "a\\\n" * 50_000 + "\n",
    "many magic lines": "!a\n" * 75_000,
    "spaces before nothing": (" " * 225_000) + "!a\n",
    "notes without end": "".join(f"if a{i}: b = AConfig()\n" for i in range(7_500)),
    "getattr": "x = getattr(torch, 'a')\n" * 10_000,
    "setattr of long keys": "args = GRPOConfig()\n" + "setattr(args, 'a' + str(1), [1])\n" * 7_500,
    "lists of named values": "x = [y := " * 80 + "1" + "]" * 80 + "\n" + "z = (a := 1)\n" * 15_000,
    "a case of many values": "match a:\n    case " + " | ".join(str(i) for i in range(30_000)) + ": x = 1\n",
    "slices of itself": "x = [1]\n" + "x[0:0] = x\n" * 60 + "x = x[:] + x[::-1]\n" * 60,
    "merged mappings by an operator": (
        "x = {" + ",".join(f"'{i}': {i}" for i in range(4_000)) + "}\n" + "x = x | x\n" * 20_000
    ),
    "text joined by itself": "t = '"
    + "a" * 9_000
    + "'\n"
    + "x = t.join(t)\n" * 3_000
    + "x = t.replace('a', t)\n" * 3_000,
    "powers by a modulus": "x = pow(7, 10**300, 10**300 + 1)\n" * 3_000 + "x = pow(10, 10**9)\n",
    "bits": "a = 1 << 9000\n" + "a = ~a ^ (a << 1) | a\n" * 9_000,
    "a pattern": "import re\nx = re.match('(a+)+$', 'a' * 5000 + 'b')\n",
    "nested functions": "".join(" " * i + f"def f{i}():\n" for i in range(95)) + " " * 95 + "return 1\nf0()\n",
    "paths of paths": "from pathlib import Path\nx = Path('a')\n" + "x = x / x / x\n" * 60,
    "half of a pair": "args = GRPOConfig(output_dir='\\ud800\\udfff', run_name='\\x00')\n",
    "large numbers": "args = GRPOConfig(num_generations=1 << 59, max_steps=1 << 59)\n" * 9,
}
"""Beginnings of Python scripts that end with a configuration of a trainer."""
SHELL = {
    "replaced by itself": "X=aaaaaaaaaaaaaaaa\n" + "X=${X//a/$X}\n" * 30,
    "replaced once": "X=aaaaaaaaaaaaaaaa\n" + "X=${X/a/$X$X$X$X}\n" * 9_000,
    "nothing replaced": "X=aaaaaaaaaaaaaaaa\n" + "X=${X///$X}\n" * 300,
    "a doubled array": "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "a doubled array by +=": "A=(a b)\n" + 'A+=("${A[@]}")\n' * 60,
    "doubled text": "X=aaaaaaaa\n" + "X=$X$X\n" * 60,
    "doubled text by +=": "X=aaaaaaaa\n" + "X+=$X\n" * 60,
    "an array of long texts": "X=aaaaaaaa\n" + "X=$X$X\n" * 14 + "A=(" + '"$X" ' * 22_500 + ")\n",
    "cut at the end": "X=" + "a" * 15_000 + "\nY=${X%%*b}\n",
    "cut at the beginning": "X=" + "a" * 15_000 + "\nY=${X##*b}\nY=${X#*b}\nY=${X%b*}\n",
    "cut by many stars": "X=" + "a" * 1_500 + "\nY=${X%%" + "*a" * 700 + "*b}\n",
    "cut by sets": "X=" + "a" * 1_500 + "\nY=${X%%" + "[a-z]*" * 300 + "b}\n",
    "cut many times": "X=" + "a" * 1_000 + "\n" + "Y=${X%%*b}\n" * 15_000,
    "a variable two thousand times": "X=" + "a" * 15_000 + "\necho " + "$X" * 2_000 + "\n",
    "a variable 300,000 times": "X=" + "a" * 15_000 + "\necho " + "$X" * 75_000 + "\n",
    "quoted 300,000 times": "X=" + "a" * 15_000 + '\necho "' + "$X" * 75_000 + '"\n',
    "words of a variable": "X='" + "a " * 7_500 + "'\n" + "echo $X $X $X $X $X $X $X $X\n" * 9_000,
    "a recursive function": 'f() { f "$@" "$@"; }\nf a b\n',
    "a function that calls itself twice": "f() { f; f; }\nf\n",
    "functions that call each other": 'f() { g "$@" "$@"; }\ng() { f "$@" "$@"; }\nf a b\n',
    "a tower of functions": "f0() { echo a; }\n"
    + "".join(f"f{i}() {{ f{i - 1} $@ $@; f{i - 1} $@ $@; }}\n" for i in range(1, 30))
    + "f29 a b\n",
    "nested loops": "for i in 1 2 3 4 5 6 7 8 9; do " * 40 + "echo $i; " + "done; " * 40 + "\n",
    "loops over arrays": "A=(1 2 3 4 5 6 7 8 9 10)\n" + 'for i in "${A[@]}"; do A=("${A[@]}" "${A[@]}"); done\n' * 30,
    "a loop of long commands": "for i in " + "1 " * 9_000 + "; do echo " + "a " * 22_500 + "; done\n",
    "braces": "N={1..1000000000}\necho {1..1000000000}{1..1000000000}{a,b}{c,d}\n",
    "nested braces": "echo " + "{a,b}" * 22_500 + "\n",
    "printf": "N=$(printf %1000000000d 1)\nprintf -v X '%*d' 1000000000 1\n",
    "seq": "for i in $(seq 1000000000); do N=$i; done\nfor ((;;)); do N=1; done\nwhile :; do N=1; done\n",
    "arithmetic powers": "N=$((9 ** 9 ** 9 ** 9))\nM=$((2**63 * 2**63))\nK=$((1 << 99999999999999))\n",
    "long arithmetic": "N=$((" + "1 + " * 50_000 + "1))\n",
    "deep arithmetic": "N=$((" + "(" * 25_000 + "1" + ")" * 25_000 + "))\n",
    "long numbers": f"N=$(({'9' * 225_000}))\nM=$((0x{'f' * 12_500}))\n",
    "a recursive variable": "X='$X$X'\nN=$((X + X))\nX=X\nN=$((X))\neval X=$X\n",
    "an index of many digits": f"A=(a b)\nN=${{A[{'9' * 9_000}]}}\nM=${{A[²]}}\n",
    "nested defaults": "N=" + "${A:-" * 9_000 + "1" + "}" * 9_000 + "\n",
    "nested substitutions": "N=" + "$(echo " * 9_000 + "1" + ")" * 9_000 + "\n",
    "nested backticks": "N=" + "`echo " * 9_000 + "\n",
    "nested subshells": "(" * 25_000 + "echo" + ")" * 25_000 + "\n",
    "nested groups": "{ " * 12_500 + "echo; " + "}; " * 12_500 + "\n",
    "nested if": "if [ 1 = 1 ]; then " * 7_500 + "N=1; " + "fi; " * 7_500 + "\n",
    "nested tests": "if [[ " + "( " * 12_500 + "1 == 1" + " )" * 12_500 + " ]]; then N=1; fi\n",
    "long and": "true" + " && true" * 22_500 + "\n",
    "long or": "false" + " || false" * 22_500 + "\n",
    "long pipes": "echo" + " | cat" * 37_500 + "\n",
    "many commands": "echo a=b --c d\n" * 15_000,
    "many assignments": "".join(f"X{i}={i}\n" for i in range(20_000)),
    "many functions": "".join(f"f{i}() {{ f{i - 1}; }}\n" for i in range(1, 10_000)) + "f9999\n",
    "many cases": "case a in\n" + "".join(f"b{i}) N={i};;\n" for i in range(12_500)) + "esac\n",
    "cases of many stars": "X=" + "a" * 15_000 + "\ncase $X in " + ("*a" * 3_000 + "*b) N=1;; ") * 35 + "esac\n",
    "tests of many stars": "X=" + "a" * 15_000 + "\nif [[ $X == " + "*a" * 9_000 + "*b ]]; then N=1; fi\n",
    "a long here-document": "read X <<EOF\n" + "a" * 225_000 + "\nEOF\n",
    "here-documents in a loop": ("for i in " + "1 " * 9_000 + "; do read X <<EOF\n" + "$i " * 22_500 + "\nEOF\ndone\n"),
    "many here-documents": "cat <<A\nA\n" * 900 + "cat <<A <<B <<C\nA\nB\nC\n" * 100,
    "unfinished here-documents": "cat <<A\n" * 1_900,
    "many redirections": "echo " + "<a " * 1_900 + "\n",
    "text of bash -c": "X='" + "echo a;" * 9_000 + "'\n" + 'bash -c "$X"\n' * 9_000,
    "bash -c in bash -c": "X=a\n" + "X=\"bash -c '$X' $X\"\n" * 60 + 'bash -c "$X"\n',
    "a script that sources itself": "source run.sh\n" * 300,
    "a script that starts itself": "bash run.sh a b c &\n" * 300,
    "large scripts that source themselves": "source run.sh\n" * 30 + "# " + "a" * 225_000 + "\n",
    "unclosed quotes": 'echo "$(' * 22_500 + "\n",
    "unclosed braces": "echo ${" * 22_500 + "\n",
    "dollars": "$" * 225_000 + "\n",
    "ampersands": "&" * 225_000 + "\n",
    "backslashes": "\\" * 225_000 + "\n",
    "continued lines": "echo \\\n" * 30_000 + "a\n",
    "continued words": "echo " + "a\\\n" * 75_000 + "\n",
    "empty lines": "\n" * 225_000,
    "comments": "#\n" * 100_000,
    "one long word": "echo " + "a" * 225_000 + "\n",
    "many quotes": "echo " + "''\"\"" * 50_000 + "\n",
    "capital letters": "X=" + "a" * 9_000 + "\n" + "Y=${X^^}${X,,}${X^}\n" * 9_000,
    "parts of text": "X=" + "a" * 15_000 + "\n" + "Y=${X:1}${X:0:99999999999}${X: -5}\n" * 5_000,
    "names of names": "".join(f"A{i}=A{i + 1}\n" for i in range(5_000)) + "N=${!A0}\n" + "A=B\nB=A\nN=${!A}\n" * 900,
    "a mapping": "declare -A M\n"
    + "".join(f"M[a{i}]={i}\n" for i in range(9_000))
    + 'N="${M[@]}" K="${!M[@]}"\n' * 300,
    "text for a command": "X=" + "a" * 9_000 + "\n" + 'cat <<< "$X$X$X"\n' * 9_000,
    "nested process substitutions": "cat " + "<(echo " * 3_000 + "a" + ")" * 3_000 + "\n",
    "tests of patterns": "X=" + "a" * 5_000 + "\nif [[ $X =~ ^(a+)+$ ]]; then N=1; fi\n" + "Y=${X%%+(a)*(a)+(a)b}\n",
    "choices within arithmetic": "N=$((" + "1?" * 9_000 + "1" + ":0" * 9_000 + "))\nM=$((64#" + "@" * 90_000 + "))\n",
    "words of eval": "X='echo a;'\n" + "X=$X$X\n" * 14 + 'eval "$X"\n' * 300,
    "shifted arguments": "set -- " + "a " * 20_000 + "\n" + "shift\n" * 20_000 + 'N="$*"\n',
    "a runtime environment": "ray job submit --runtime-env-json='" + '{"a":' * 3_000 + "' -- echo a\n",
    "a fork bomb": ":(){ :|:& };:\n",
    "what is executed": "X=$(touch sprung)\n`touch sprung`\neval touch sprung\ntouch sprung\ncat /etc/passwd\n",
    "a device": "source /dev/zero\nbash /dev/random\n. /dev/stdin\n",
    "many options": "N=1\npython3 -m verl.trainer.main_ppo " + " ".join(f"a.b{i}=1" for i in range(15_000)) + "\n",
    "known options beside unknown ones": (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b "
        + " ".join(f"trainer.x{i}=1 actor_rollout_ref.model.y{i}=2" for i in range(1_500))
        + "\n"
    ),
}
"""Beginnings of shell scripts that end with a command that starts verl."""
_VERL = "actor_rollout_ref: {model: {path: a/b}}\n"
_LOL = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1}]\n" for i in range(1, 30)
)
DOCUMENTS = {
    "aliases of aliases": ("yaml", _LOL),
    "merged aliases": (
        "yaml",
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 999)),
    ),
    "an alias in itself": ("yaml", "a: &a [*a, *a]\nb: *a\n"),
    "deep lists": ("yaml", "a: " + "[" * 400_000),
    "deep mappings": ("yaml", "a: " + "{b: " * 200_000),
    "deep blocks": ("yaml", "".join(" " * i + "a:\n" for i in range(1_300))),
    "deep dashes": ("yaml", "- " * 400_000),
    "many keys": ("yaml", "".join(f"a{i}: {i}\n" for i in range(70_000))),
    "as many keys as are read": ("yaml", "".join(f"a{i}: {i}\n" for i in range(3_900))),
    "as many known keys": (
        "yaml",
        _VERL
        + "trainer:\n"
        + "".join(f"  a{i}: 1\n" for i in range(2_000))
        + "data:\n"
        + "".join(f"  b{i}: 1\n" for i in range(1_700)),
    ),
    "as many numbers as are read": ("yaml", "a: [" + "1.5, " * 150_000 + "]"),
    "one long line": ("yaml", "a: " + "b " * 450_000),
    "one long word": ("yaml", "a: " + "b" * 900_000),
    "quoted words": ("yaml", 'a: "' + "\\x41" * 240_000 + '"'),
    "a long block": ("yaml", "a: |\n" + "  b\n" * 240_000),
    "a folded block": ("yaml", "a: >\n" + "  b\n\n" * 150_000),
    "empty lines": ("yaml", "a: b\n" + "\n" * 900_000),
    "comments": ("yaml", "#\n" * 400_000 + "a: b\n"),
    "question marks": ("yaml", "? " * 400_000),
    "colons": ("yaml", ":" * 900_000),
    "tags": ("yaml", "a: !!python/object/apply:os.system ['touch sprung']\n"),
    "documents": ("yaml", "---\n" * 240_000),
    "directives": ("yaml", "%YAML 1.2\n" * 90_000),
    "anchors": ("yaml", "a: [" + ",".join(f"&a{i} b" for i in range(80_000)) + "]"),
    "a long number": ("yaml", _VERL + "data: {train_batch_size: " + "9" * 900_000 + "}"),
    "numbers by colons": ("yaml", _VERL + "data: {train_batch_size: 1" + ":59" * 300_000 + "}"),
    "underscores": ("yaml", _VERL + "data: {train_batch_size: 1" + "_" * 900_000 + "x}"),
    "references": ("yaml", _VERL + "data: {train_batch_size: '${a}'}\na: ${b}\nb: ${a}\n"),
    "products": (
        "yaml",
        _VERL + "data: {train_batch_size: '${mul:${mul:9,9},9}'}\na: '${mul:" + "9" * 9_000 + ", 9}'\n",
    ),
    "bases of itself": ("yaml", "defaults: [hostile.yaml, hostile.yaml, hostile.yaml]\n" + _VERL),
    "a chain of anchors": (
        "yaml",
        "k0: &k0 {v: 1}\n" + "".join(f"k{i}: &k{i} {{v: *k{i - 1}}}\n" for i in range(1, 2_000)),
    ),
    "a mapping merged many times": (
        "yaml",
        "b: &b {"
        + ",".join(f"x{i}: 1" for i in range(3_000))
        + "}\n"
        + "".join(f"k{i}: {{<<: *b}}\n" for i in range(500)),
    ),
    "a merge of itself": ("yaml", "a: &a\n  <<: *a\n  b: 1\n"),
    "doubled references": (
        "yaml",
        _VERL
        + "".join(f"v{i}: ${{v{i + 1}}}${{v{i + 1}}}\n" for i in range(60))
        + "v60: x\ndata: {train_batch_size: '${v0}'}\n",
    ),
    "calls of a resolver": ("yaml", _VERL + "data: {train_batch_size: '${eval:9**9**9}', x: '${oc.env:HOME}'}\n"),
    "numbers that are none": ("yaml", _VERL + "data: {train_batch_size: 1e" + "9" * 9_000 + ", x: .inf, y: -.nan}\n"),
    "a list of bases": ("yaml", "defaults:\n" + "".join(f"  - a{i}: b{i}\n" for i in range(9_000)) + _VERL),
    "empty objects of JSON": ("json", '{"a":[' + "{}," * 300_000 + "{}]}"),
    "halves of pairs of JSON": ("json", '{"a": "' + "\\ud800" * 90_000 + '"}'),
    "tables of tables of TOML": ("toml", "".join(f"[a.b{i}]\nc = 1\n[a.b{i}.d]\ne = 1\n" for i in range(9_000))),
    "lists of lists of TOML": ("toml", "".join("[[" + ".".join(["a"] * i) + "]]\n" for i in range(1, 400))),
    "deep JSON": ("json", "[" * 900_000),
    "deep JSON mappings": ("json", '{"a":' * 150_000),
    "a long number of JSON": ("json", '{"actor_rollout_ref": ' + "9" * 900_000 + "}"),
    "many numbers of JSON": ("json", '{"a": [' + "0," * 400_000 + "0]}"),
    "equal keys of JSON": ("json", "{" + '"a": 1, ' * 100_000 + '"a": 2}'),
    "deep TOML": ("toml", "a = " + "[" * 900_000),
    "deep TOML tables": ("toml", "a = " + "{b = " * 150_000),
    "dotted TOML": ("toml", "a" + ".a" * 400_000 + " = 1\n"),
    "many dotted TOML": ("toml", "".join("a" + ".a" * 400 + f".b{i} = 1\n" for i in range(1_100))),
    "dotted TOML tables": ("toml", "".join("[" + "a." * 400 + f"b{i}]\n" for i in range(1_100))),
    "lists of TOML tables": ("toml", "[[a]]\n" * 150_000),
    "a long number of TOML": ("toml", "a = " + "9" * 900_000 + "\n"),
    "a long hexadecimal of TOML": ("toml", "a = 0x" + "f" * 900_000 + "\n"),
    "many keys of TOML": ("toml", "".join(f"a{i} = 1\n" for i in range(80_000))),
    "a date of TOML": ("toml", "orchestrator = 1979-05-27T07:32:00Z\ntrainer = 07:32:00\n"),
    "text of TOML": ("toml", 'a = """' + "\\u0041" * 150_000 + '"""\n'),
}
"""Documents, each with its suffix."""
_CELL = '{"cell_type": "code", "source": %s}'
NOTEBOOKS = {
    "deep": "[" * 900_000,
    "many cells": '{"cells": [' + ",".join([_CELL % '"x = 1"'] * 20_000) + "]}",
    "one long cell": '{"cells": [' + _CELL % ('"' + "x = 1 + 1\\n" * 70_000 + '"') + "]}",
    "many lines": '{"cells": [' + _CELL % ("[" + ",".join(['"x = [1, 2]\\n"'] * 60_000) + "]") + "]}",
    "deep metadata": '{"cells": [], "metadata": ' + '{"a":' * 90_000 + "}",
    "deep source": '{"cells": [{"cell_type": "code", "source": ' + "[" * 900 + '"x = 1"' + "]" * 900 + "}]}",
    "magics": '{"cells": [' + ",".join([_CELL % '"%%bash\\n!echo a\\n%timeit x\\n?x"'] * 6_000) + "]}",
    "no text": '{"cells": [{"cell_type": "code", "source": 3}]}',
    "a long number": '{"cells": ' + "9" * 900_000 + "}",
}


def list_scripts() -> Iterator[tuple[str, str, bytes]]:
    """(name, name of the file, its bytes) of each hostile script and configuration."""
    for name, text in PYTHON.items():
        yield f"python: {name}", "train.py", (TRAINER + text + _END).encode()
    for name, text in SHELL.items():
        yield f"shell: {name}", "run.sh", (text + _START).encode()
    for name, (suffix, text) in DOCUMENTS.items():
        yield f"{suffix}: {name}", f"hostile.{suffix}", text.encode()
    for name, text in NOTEBOOKS.items():
        yield f"notebook: {name}", "train.ipynb", text.encode()


LOGS = {
    "one word": "step:1 - " + "a" * 2_000_000,
    "digits": "step:" + "1" * 2_000_000,
    "prime": "Step 1 | " + "A 1 " * 500_000,
    "open braces": "{a" * 900_000,
    "quotes": "{" + "'a': " * 400_000,
    "ranks": "(a pid=" * 300_000,
    "spaces": " " * 2_000_000,
    "empty lines": "\n" * 1_000_000,
    "escapes": "\x1b[" + "1;" * 1_000_000,
    "wrapped lines": "step:1 - a:1\n" + " - a:1\n" * 200_000,
    "progress bars": " 10%|x| 3/30 [00:15<02:15,  5.0s/it]\r" * 50_000,
    "walls of tables": "│" * 600_000,
    "nested mappings": "{'a': " * 200_000 + "1" + "}" * 200_000 + "\n",
    "numbers of numpy": "{'loss': np.float64(" * 90_000 + "1)}\n",
    "many steps": "".join(f"step:{i} - timing_s/gen:1 - timing_s/step:2\n" for i in range(20_000)),
    "durations": "{'loss': 1, 'elapsed_time': '" + "1" * 30_000 + "'}\n",
}
"""Consoles on which a search takes quadratic time unless it is bounded."""
