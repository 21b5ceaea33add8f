#!/usr/bin/env bash
# Try our picture trainer in ComfyUI, and what we write for sd-scripts and ai-toolkit, in their real code, on small
# random models and a CPU.
#
#   scripts/real_image_engines.sh SD_SCRIPTS AI_TOOLKIT [--python-kohya P] [--python-toolkit P]
#                                 [--python P] [--out DIRECTORY] [--steps N] [--no-container]
#                                 [--comfyui CHECKOUT] [--python-comfyui P]
#                                 [--only configurations|trainings|rehearsals|comfyui]
#
# SD_SCRIPTS and AI_TOOLKIT are checkouts, not needed with --only comfyui; each P is a Python that can run the engine
# (its requirements.txt with any torch; for ai-toolkit a CPU needs a torch without Triton; for ComfyUI
# requirements/pictures.txt, with Python 3.12). --python is the one with god-miner's own packages. Every configuration
# is read by the engine and, with --steps, trains a small model for so many steps as well. In ComfyUI each family
# trains 100 steps, and both the file and the measure are compared with a separate evaluation (comfyui_trainings.py).
# Rehearsals are each image kind of tournaments from clone to score; they take minutes each, so only if asked for.
# Prints a table and ends with 1 if anything failed. Containers are used where Docker answers.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
here=$root/scripts/real_image_engines
usage() { sed -n '2,16p' "$0" | cut -c3- >&2; exit 2; }

places=() python=$root/.venv/bin/python kohya_python=python3 toolkit_python=python3
out=$(pwd)/real-image-engines how=container only=all steps=0 comfyui='' comfyui_python=python3
while [ $# -gt 0 ]; do
    case $1 in
        --python-kohya) kohya_python=${2:?}; shift 2 ;;
        --python-toolkit) toolkit_python=${2:?}; shift 2 ;;
        --comfyui) comfyui=$(cd "${2:?}" && pwd); shift 2 ;;
        --python-comfyui) comfyui_python=${2:?}; shift 2 ;;
        --python) python=${2:?}; shift 2 ;;
        --out) out=${2:?}; shift 2 ;;
        --steps) steps=${2:?}; shift 2 ;;
        --only) only=${2:?}; shift 2 ;;
        --no-container) how=process; shift ;;
        -*) usage ;;
        *) places+=("$1"); shift ;;
    esac
done
if [ $only = comfyui ] && [ -n "$comfyui" ]; then
    mkdir -p "$out"
    : >"$out/records.jsonl"
    OMP_NUM_THREADS=1 "$comfyui_python" "$here/comfyui_trainings.py" "$out/comfyui" "$comfyui" "$out/records.jsonl" || true
    PYTHONPATH=$root exec "$python" "$here/table.py" "$out/records.jsonl"
fi
[ ${#places[@]} -eq 2 ] || usage
sd_scripts=$(cd "${places[0]}" && pwd) ai_toolkit=$(cd "${places[1]}" && pwd)
for file in "$sd_scripts/sdxl_train_network.py" "$ai_toolkit/run.py"; do
    [ -f "$file" ] || { echo "$file is not there: is this the checkout?" >&2; exit 2; }
done
if [ "$how" = container ] && ! docker info >/dev/null 2>&1; then
    echo "Docker does not answer: without containers" >&2
    how=process
fi

mkdir -p "$out/bin" "$out/models"
out=$(cd "$out" && pwd)
records=$out/records.jsonl
: >"$records"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE=1

# The engines' Pythons, with their hard-coded dimensions made small.
for engine in kohya ai-toolkit; do
    [ $engine = kohya ] && interpreter=$kohya_python || interpreter=$toolkit_python
    interpreter=$(command -v "$interpreter")
    printf '#!/bin/sh\nPYTHONPATH=%q exec %q "$@"\n' "$here/smaller" "$interpreter" >"$out/bin/python-$engine"
    chmod 755 "$out/bin/python-$engine"
done

# Random models, each in a cache as validators lay it out.
make_model() { # engine, script, family, name, checkout
    [ -d "$out/models/$4/models" ] && return
    echo "making a small $3 for $1" >&2
    "$out/bin/python-$1" "$here/$2" "$3" "$out/models/$4" "$5" >"$out/models/$4.log" 2>&1 \
        || { tail -5 "$out/models/$4.log" >&2; exit 1; }
}
for family in sdxl flux; do make_model kohya kohya_models.py $family kohya-$family "$sd_scripts"; done
for family in z-image qwen-image krea2 ideogram4 flux; do
    make_model ai-toolkit toolkit_models.py $family $family "$ai_toolkit"
done

# Every configuration in the engine's own code.
if [ $only = all ] || [ $only = configurations ]; then
    rm -rf "$out/configurations" "$out/hub"
    mkdir -p "$out/hub" "$out/pictures/10_lora style"
    cp -r "$out"/models/kohya-*/hf_cache/. "$out/hub/"
    PYTHONPATH=$root "$python" "$here/configurations.py" "$out/configurations" "$out/pictures/10_lora style"
    for engine in kohya ai-toolkit; do
        checkout=$sd_scripts pictures=$out/pictures
        [ $engine = kohya ] || checkout=$ai_toolkit pictures="$out/pictures/10_lora style"
        echo "configurations for $engine" >&2
        HF_HUB_CACHE=$out/hub "$out/bin/python-$engine" "$here/${engine#ai-}_configurations.py" \
            "$out/configurations" "$checkout" "$out/models" "$pictures" "$steps" 2>"$out/$engine.log" \
            | tee -a "$records" | sed -n 's/^{"name": "\([^"]*\)".*"ok": false.*/failed: \1/p' >&2 || true
    done
fi

# Whole trainings through our own entry point.
if [ $only = all ] || [ $only = trainings ]; then
    PYTHONPATH=$root "$python" "$here/train.py" "$out" "$sd_scripts" "$ai_toolkit" $how "$records" || true
fi

if [ $only = all ] && [ -n "$comfyui" ]; then
    "$comfyui_python" "$here/comfyui_trainings.py" "$out/comfyui" "$comfyui" "$records" || true
fi

# What validators do with this working tree, in an engine of its own that shows it the environments.
if [ $only = rehearsals ]; then
    PYTHONPATH=$root "$python" "$here/rehearse.py" "$out" "$sd_scripts" "$ai_toolkit" "$records" || true
fi
PYTHONPATH=$root "$python" "$here/table.py" "$records"
