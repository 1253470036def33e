"""The pieces of one residual block, each kind in a registry keyed by the name users write in YAML.

| registry           | YAML key                                  | table                 | entries              |
|--------------------|-------------------------------------------|-----------------------|----------------------|
| NORMS              | `norm`                                    | norms/                | norms/               |
| INITS              | `init_method`, `output_layer_init_method` | init/                 | init/                |
| ACTIVATIONS        | `activation`                              | activations/          | activations/         |
| POSITIONS          | `pos_emb`                                 | positions/            | positions/           |
| MIXERS             | `attention_config`                        | parts.py              | attention, mamba*    |
| MLPS               | `mlp_config`                              | parts.py              | mlp, moe/            |
| ATTENTION_BACKENDS | `attention_backend`                       | attention_contract.py | attention_*          |
"""
