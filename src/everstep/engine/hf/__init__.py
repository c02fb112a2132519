"""Causal language models of Hugging Face transformers, cut into stages.

    config or folder ──► source.py    what to build: a config, and where its weights are
                         anatomy.py   which modules run before, in and after the row of decoder layers
                         weights.py   one module with its values: read from safetensors, or drawn
                         stage.py     a stage: the model's own forward around the modules that are here
                         model.py     all of it as a `Model`: what `everstep.hf` gives

transformers is not a dependency of Everstep; it is imported when a model is asked for.
"""
