"""The pieces of one residual block, each kind in a registry keyed by the name users write in YAML.

| registry           | YAML key                                 | file                 |
|--------------------|------------------------------------------|----------------------|
| NORMS              | `norm`                                   | norms.py             |
| INITS              | `init_method`, `output_layer_init_method`| init.py              |
| ACTIVATIONS        | `activation`                             | activations.py       |
| POSITIONS          | `pos_emb`                                | positions.py         |
| MIXERS             | `attention_config`                       | attention.py         |
| ATTENTION_BACKENDS | -                                        | attention_backends.py|
| MLPS               | -                                        | mlp.py               |
"""
