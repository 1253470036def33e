"""Chat templates in the styles that are in use, and tokenizers with their special tokens. Written for these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Headers between special tokens, contents trimmed, the text begins with a token of its own.
HEADERS = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|head|>' + message.role + '<|/head|>\\n\\n' + message.content | trim + '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
# Markers that are plain text; a turn of the model ends with the end-of-sequence token and a line break.
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% else %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
# The SLURM fork's instruct style: nothing ends the turns of others, eos ends the model's.
INSTRUCT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' + message['content'] + eos_token }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# No end of turn at all.
BARE = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)
# The system text moves into the first question; no generation prompt; roles must alternate.
INST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '') "
    "+ m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
TAGGED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Reasoning is kept in the last turn only: the rendering of some turns is no prefix of the rendering of more.
STRIPPING = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Reasoning as a field of its own or inside the content, an empty one written for turns after the last question.
REASONING = """{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<result>') %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_user and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\nTools:' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<result>\n' + message.content + '\n</result><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# The last turn ends in another token than the earlier ones; the model also writes the channel.
CHANNELS = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

SPECIAL = (
    *("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"),
    *("<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"),
)
# template -> (text, bos, eos)
TEMPLATES = {
    "chatml": (CHATML, None, "<|im_end|>"),
    "chatml of a base model": (CHATML, None, "<|endoftext|>"),
    "headers": (HEADERS, "<s>", "<|eot|>"),
    "zephyr": (ZEPHYR, "<s>", "</s>"),
    "instruct": (INSTRUCT, None, "<|endoftext|>"),
    "bare": (BARE, None, "</s>"),
    "inst": (INST, "<s>", "</s>"),
    "tagged": (TAGGED, None, "<|im_end|>"),
    "stripping": (STRIPPING, None, "<|im_end|>"),
    "reasoning": (REASONING, None, "<|im_end|>"),
    "tools": (TOOLS, None, "<|im_end|>"),
    "channels": (CHANNELS, None, "<|return|>"),
}
LEARNT = [
    "Hello, how are you?\n\nI am fine. Thank you!\n### user:\n### assistant:\n",
    "<|user|>\n<|assistant|>\n<|system|>\nassistant\nuser\nsystem\n .\n\n  return x\n    if y:\n",
    'naïve café 中文字 🤖 "name": "arguments": {"city": "Paris"} [INST] [/INST] <think>\n</think>\n\n',
]


def backend(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """A byte-level BPE with merges across words, blanks and line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LEARNT * 20, trainer)
    return tokenizer


def write_folder(folder: Path, name: str, **config: Any) -> Path:
    """A Hugging Face tokenizer folder with the template of that name."""
    template, bos, eos = TEMPLATES[name]
    folder.mkdir(parents=True, exist_ok=True)
    backend().save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": eos} if bos is None else {"bos_token": bos, "eos_token": eos}
    stored = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder
