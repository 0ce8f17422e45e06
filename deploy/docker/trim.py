"""Takes out of an environment what no process of ours opens, and compiles what is left.

`ENVIRONMENT/bin/python trim.py`, after `pip install --no-compile` and in the same layer: what a
later layer removes is still in the image. The modules are compiled here, since the images are
read-only and each start would do it again; by all processors, which pip does not. Headers stay, for
images that add a C++ compiler to torch.
"""

import compileall
import shutil
import sysconfig
from pathlib import Path

TORCH_TOOLS = "torch_shm_manager"
"""What torch itself starts; the rest of torch/bin are its tests and protoc."""


def unused(packages: Path) -> list[Path]:
    """Tests and type stubs of installed packages, and torch's test programs; licences stay."""
    found = [packages / "torch" / "test", packages / "joblib" / "test"]
    found += [each for each in packages.glob("torch/bin/*") if each.name != TORCH_TOOLS]
    for package in packages.iterdir():
        if package.is_dir() and package.suffix != ".dist-info":
            found += [each for each in package.rglob("tests") if each.is_dir()]
            found += package.rglob("*.pyi")
    return found


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    packages = Path(sysconfig.get_path("platlib"))
    for path in unused(packages):
        remove(path)
    # Some packages ship templates that are no Python; pip says nothing about them either.
    compileall.compile_dir(packages, quiet=2, workers=0)


if __name__ == "__main__":
    main()
