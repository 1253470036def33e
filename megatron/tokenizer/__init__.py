"""Text to token ids: one class per `tokenizer_type`, and the fingerprint that ties data to a tokenizer."""

from megatron.tokenizer.base import TOKENIZERS, Tokenizer
from megatron.tokenizer.build import build_tokenizer, create_tokenizer
from megatron.tokenizer.exact import CHOICES as ENCODERS
from megatron.tokenizer.exact import choose_encoder
from megatron.tokenizer.fingerprint import Fingerprint
from megatron.tokenizer.ragged import Ragged

__all__ = [
    "ENCODERS",
    "TOKENIZERS",
    "Fingerprint",
    "Ragged",
    "Tokenizer",
    "build_tokenizer",
    "choose_encoder",
    "create_tokenizer",
]
