#!/usr/bin/env bash
# Writes requirements/pythonX.Y.txt: the version of every package, direct or transitive, for one version of Python.
#
#     scripts/pin.sh python3.11
#
# Run it after a change of requirements/*.txt. It resolves anew, without installing; what it writes is what setup.sh
# installs. NVIDIA's packages are left out: only CUDA builds of PyTorch need them, and those pin their own. Triton is in
# the version that these builds need, also where there is no GPU: its interpreter runs the tests.
set -euo pipefail

python=${1:?usage: scripts/pin.sh PYTHON}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
torch=2.13.0 triton=3.7.1
if [ "$version" = 3.9 ]; then torch=2.8.0 triton=3.4.0; fi  # the last releases for Python 3.9

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "pip==25.3"  # the last release for Python 3.9
"$work/venv/bin/pip" install --quiet --dry-run --ignore-installed --report "$work/report.json" \
    "pip==25.3" "torch==$torch" "triton==$triton" -r "$root/requirements/tools.txt" -r "$root/requirements/frameworks.txt" \
    -r "$root/requirements/project.txt"
"$work/venv/bin/python" - "$work/report.json" "$version" > "$work/pins.txt" <<'PYTHON'
import json
import re
import sys

report, version = sys.argv[1:]
print(f"# Every package that scripts/setup.sh installs for Python {version}. Written by scripts/pin.sh.")
with open(report) as file:
    metadata = [item["metadata"] for item in json.load(file)["install"]]
for package in sorted(metadata, key=lambda package: package["name"].lower()):
    if not re.match(r"nvidia-|cuda-", package["name"]):
        print(f"{package['name'].lower().replace('_', '-')}=={package['version'].split('+')[0]}")
PYTHON
mv "$work/pins.txt" "$root/requirements/python$version.txt"
