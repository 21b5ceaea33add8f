"""Print the keys that ai-toolkit reads from a config, as JSON.

    python scripts/engine_tables/ai_toolkit_table.py CHECKOUT > core/recipes/ai_toolkit/table.json

CHECKOUT is a folder with ostris/ai-toolkit at the commit of the images. ai-toolkit has no schema: its config
classes take `**kwargs` and read each key with `kwargs.get(key, default)`, and other keys are silently
dropped. So the source is read, not run: every `get` with a literal key is a key, and its type is the
annotation of the attribute it is assigned to, else the type of the default.
"""

import ast
import pathlib
import re
import sys

from common import commit_of, one_key_per_line

#: The classes of a LoRA config, all in toolkit/config_modules.py, and the section of each.
CLASSES = {
    "NetworkConfig": "network",
    "TrainConfig": "train",
    "ModelConfig": "model",
    "SaveConfig": "save",
    "SampleConfig": "sample",
    "LoggingConfig": "logging",
}
PATH = ["null", "str"]
#: Types where both annotation and default are wrong.
TYPES = {
    ("TrainConfig", "ema_config"): [{"object": "EMAConfig"}],
    ("SampleConfig", "samples"): [{"list": [{"object": "SampleItem"}]}],
    ("NetworkConfig", "network_kwargs"): [{"object": "network_kwargs"}],
    ("ModelConfig", "model_kwargs"): [{"object": "model_kwargs"}],
    # Annotated as one number, but `preprocess_dataset_raw_config` takes a list and copies the dataset.
    ("DatasetConfig", "resolution"): ["int", {"list": ["int"]}],
    # Annotated as text but read as a number; integer defaults of fractions.
    ("TrainConfig", "guidance_loss_target"): ["float", {"list": ["float"]}],
    ("SampleConfig", "guidance_scale"): ["float"],
    ("SampleConfig", "network_multiplier"): ["float"],
    ("SampleConfig", "neg"): ["bool", "str"],
    # The default is another attribute or None, which has no type.
    ("ModelConfig", "quantize_te"): ["bool"],
    ("ModelConfig", "layer_offloading"): ["bool"],
    ("ModelConfig", "arch"): ["str"],  # its Literal lists a third of what there is; see `architectures`
    ("ModelConfig", "assistant_lora_path"): PATH,
    ("ModelConfig", "unconditional_lora_path"): PATH,
    ("ModelConfig", "vae_path"): PATH,
    ("ModelConfig", "te_name_or_path"): PATH,
    ("ModelConfig", "extras_name_or_path"): PATH,
    ("ModelConfig", "accuracy_recovery_adapter"): PATH,
    ("NetworkConfig", "linear"): ["int", "null"],
    ("NetworkConfig", "rank"): ["int", "null"],
    ("NetworkConfig", "lokr_factor"): ["int"],
    ("NetworkConfig", "pretrained_lora_path"): PATH,
    ("TrainConfig", "unet_lr"): ["float"],
    ("TrainConfig", "text_encoder_lr"): ["float"],
    ("TrainConfig", "min_snr_gamma"): ["float", "null"],
    ("TrainConfig", "snr_gamma"): ["float", "null"],
    ("model_kwargs", "checkpoint_filename"): PATH,
    ("model_kwargs", "text_encoder_path"): PATH,
    ("model_kwargs", "vae_path"): PATH,
    ("process", "name"): ["str"],
    ("process", "training_folder"): ["str"],
    ("process", "training_seed"): ["int", "null"],
    ("process", "trigger_word"): ["null", "str"],
    ("process", "log_dir"): PATH,
}
PROCESS_FILES = (
    "jobs/process/BaseProcess.py",
    "jobs/process/BaseTrainProcess.py",
    "jobs/process/BaseSDTrainProcess.py",
    "extensions_built_in/sd_trainer/DiffusionTrainer.py",
)
#: Read by the job machinery before any config class is built.
PROCESS_EXTRA = {"type": ["str"], "device": ["str"]}
#: The models of the architectures we train, for the keys that they read from `model_kwargs`.
MODEL_FILES = ("krea2/krea2.py", "ideogram4/ideogram4.py", "qwen_image/qwen_image.py", "z_image/z_image.py")
SCALARS = {"int": ["int"], "float": ["float"], "str": ["str"], "bool": ["bool"], "dict": [{"dict": ["any"]}]}


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def from_annotation(node: ast.expr | None, literals: dict[str, list[str]]) -> list | None:
    text = ast.unparse(node) if node is not None else ""
    if text in literals:
        return [{"choices": literals[text]}]
    text = re.sub(r"Optional\[(.*)\]", r"\1", text)
    text = re.sub(r"Union\[(.*), None\]", r"\1", text)
    if text in SCALARS:
        return SCALARS[text]
    listed = re.fullmatch(r"[Ll]ist\[(\w+)\]", text)
    return [{"list": SCALARS.get(listed[1], ["any"])}] if listed else None


def from_default(node: ast.expr | None) -> list:
    if isinstance(node, ast.Constant) and node.value is not None:
        return SCALARS[type(node.value).__name__]
    if isinstance(node, ast.Dict):
        return SCALARS["dict"]
    if isinstance(node, ast.List):
        return [{"list": ["any"]}]
    return ["any"]


def is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def literal_names(tree: ast.Module) -> dict[str, list[str]]:
    """The choices of each `Name = Literal['a', 'b']` in the module."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            constants = (inner for inner in ast.walk(node.value) if isinstance(inner, ast.Constant))
            names[node.targets[0].id] = sorted(constant.value for constant in constants)
    return names


def reads(tree: ast.AST, caller: str) -> list[tuple[str, ast.Call, ast.expr | None]]:
    """Each `caller("key", ...)`, with the annotation of its statement."""
    result = []
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr | ast.If):
            continue
        annotation = getattr(statement, "annotation", None)
        for call in ast.walk(statement):
            is_read = isinstance(call, ast.Call) and ast.unparse(call.func).endswith(caller)
            if is_read and call.args and isinstance(call.args[0], ast.Constant):
                result.append((call.args[0].value, call, annotation))
    return result


def keys(tree: ast.AST, caller: str, owner: str, literals: dict[str, list[str]]) -> dict:
    result = {}
    for key, call, annotation in reads(tree, caller):
        default = call.args[1] if len(call.args) > 1 else None
        kind = TYPES.get((owner, key))
        if kind is None:
            kind = from_annotation(annotation, literals) or from_default(default)
            if is_none(default) and kind != ["any"]:
                kind = [*kind, "null"]
        if key not in result or result[key] == ["any"]:
            result[key] = kind
    return dict(sorted(result.items()))


def architectures(checkout: pathlib.Path) -> list[str]:
    """`arch = "..."` of each model class, and those that ModelConfig itself names."""
    names = {"sdxl", "flux", "sd1"}
    for path in (checkout / "extensions_built_in").rglob("*.py"):
        names |= set(re.findall(r'^    arch = "([^"]+)"', path.read_text("utf-8"), re.MULTILINE))
    source = (checkout / "toolkit" / "config_modules.py").read_text("utf-8")
    return sorted(names | set(re.findall(r"self\.arch == '(\w+)'", source)))


def optimizers(checkout: pathlib.Path) -> list[str]:
    source = (checkout / "toolkit" / "optimizer.py").read_text("utf-8")
    exact = re.findall(r"lower_type == ['\"](\w+)['\"]", source)
    prefixes = re.findall(r"lower_type\.startswith\(['\"](\w+)['\"]\)", source)
    return sorted(set(exact) | set(prefixes))


def schedulers(checkout: pathlib.Path) -> list[str]:
    source = (checkout / "toolkit" / "scheduler.py").read_text("utf-8")
    return sorted(set(re.findall(r"name == ['\"](\w+)['\"]", source)))


def version(checkout: pathlib.Path) -> str:
    """The released version and the commit."""
    released = re.findall(r'VERSION = "([^"]+)"', (checkout / "version.py").read_text("utf-8"))[0]
    return f"{released} {commit_of(checkout)}"


def process_keys(checkout: pathlib.Path, sections: dict[str, list]) -> dict:
    result = dict(PROCESS_EXTRA)
    for file in PROCESS_FILES:
        tree = parse(checkout / file)
        result |= keys(tree, ".get_conf", "process", {}) | keys(tree, "self.config.get", "process", {})
    return dict(sorted((result | sections).items()))


def model_kwargs(checkout: pathlib.Path) -> dict:
    folder = checkout / "extensions_built_in" / "diffusion_models"
    result: dict = {}
    for file in MODEL_FILES:
        result |= keys(parse(folder / file), "model_kwargs.get", "model_kwargs", {})
    return dict(sorted(result.items()))


def table(checkout: pathlib.Path) -> dict:
    tree = parse(checkout / "toolkit" / "config_modules.py")
    literals = literal_names(tree)
    wanted = {*CLASSES, "DatasetConfig", "EMAConfig", "SampleItem"}
    classes = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted
    }
    objects = {name: keys(node, "kwargs.get", name, literals) for name, node in classes.items()}
    sections = {section: [{"object": name}] for name, section in CLASSES.items()}
    sections["datasets"] = [{"list": [{"object": "DatasetConfig"}]}]
    objects["process"] = process_keys(checkout, sections)
    objects["model_kwargs"] = model_kwargs(checkout)
    objects["network_kwargs"] = {
        key: [{"list": ["str"]}] for key in ("full_if_contains", "ignore_if_contains", "only_if_contains")
    }
    objects["meta"] = {"name": ["str"], "version": ["str"]}
    objects["config"] = {"name": ["str"], "process": [{"list": [{"object": "process"}]}]}
    objects["job"] = {
        "job": [{"choices": ["extension"]}],
        "config": [{"object": "config"}],
        "meta": [{"object": "meta"}],
    }
    return {
        "engine": "ai-toolkit",
        "version": version(checkout),
        "root": "job",
        "architectures": architectures(checkout),
        "optimizers": optimizers(checkout),
        "schedulers": schedulers(checkout),
        "objects": dict(sorted(objects.items())),
    }


if __name__ == "__main__":
    sys.stdout.write(one_key_per_line(table(pathlib.Path(sys.argv[1]).resolve())))
