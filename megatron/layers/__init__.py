"""The pieces of one residual block, each kind in a registry keyed by the name users write in YAML.

| registry           | YAML key                                 | file                 |
|--------------------|------------------------------------------|----------------------|
| NORMS              | `norm`                                   | norms/               |
| INITS              | `init_method`, `output_layer_init_method`| init/                |
| ACTIVATIONS        | `activation`                             | activations/         |
| POSITIONS          | `pos_emb`                                | positions/           |
| MIXERS             | `attention_config`                       | attention.py         |
| ATTENTION_BACKENDS | -                                        | attention_backends.py|
| MLPS               | -                                        | mlp.py               |
"""
