"""Text to token ids: one class per `tokenizer_type`, and the fingerprint that ties data to a tokenizer."""

from megatron.tokenizer.base import TOKENIZERS, Tokenizer
from megatron.tokenizer.build import build_tokenizer, create_tokenizer
from megatron.tokenizer.fingerprint import Fingerprint

__all__ = ["TOKENIZERS", "Fingerprint", "Tokenizer", "build_tokenizer", "create_tokenizer"]
