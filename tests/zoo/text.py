"""Text: encoders with a classifier, language models, encoder-decoders."""

from __future__ import annotations

from typing import Any

import torch

from .entry import CLASSES, VOCABULARY, Batch, Entry, both, classes, language_loss, nothing, token_labels, tokens
from .pretrained import FromMaskedTokens, FromTokens, FromTwoTexts, plain, wrapped

_LENGTHS = (8, 11)
_USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = _USUAL | {"num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


def _mask(size: int, length: int) -> Batch:
    """Every sample but the first ends earlier."""
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[1:, -2:] = 0
    return {"attention_mask": mask}


def _classifier(name: str, model: str, kind: str, *, masked: bool = False, **sizes: Any) -> Entry:
    """A text classifier; with `masked` the module gets an attention mask too."""
    sizes = _USUAL | {"num_labels": CLASSES} | sizes
    make = wrapped(FromMaskedTokens if masked else FromTokens, model, kind, **sizes)
    inputs = both(tokens(), _mask) if masked else tokens()
    sequence = {"input_ids": (1,)} | ({"attention_mask": (1,)} if masked else {})
    return Entry(name, "text", make, inputs, classes(), lengths=_LENGTHS, sequence=sequence)


def _language(name: str, model: str, kind: str, *, own_loss: bool = False, **sizes: Any) -> Entry:
    """A language model; with `own_loss` as `transformers` gives it, labels in and loss out."""
    sequence = {"input_ids": (1,), "labels": (1,)}
    if own_loss:
        inputs = both(tokens(), token_labels())
        return Entry(name, "text", plain(model, kind, **sizes), inputs, nothing, loss=None, lengths=_LENGTHS, sequence=sequence)
    make = wrapped(FromTokens, model, kind, **sizes)
    return Entry(name, "text", make, tokens(), token_labels(), loss=language_loss, lengths=_LENGTHS, sequence=sequence)


def _two_texts(name: str, model: str, kind: str, *, own_loss: bool = False, **sizes: Any) -> Entry:
    sequence = {"input_ids": (1,), "decoder_input_ids": (1,), "labels": (1,)}
    if own_loss:
        inputs = both(tokens(), token_labels())
        return Entry(name, "text", plain(model, kind, **sizes), inputs, nothing, loss=None, lengths=_LENGTHS, sequence=sequence)
    inputs = both(tokens(), tokens("decoder_input_ids"))
    make = wrapped(FromTwoTexts, model, kind, **sizes)
    return Entry(name, "text", make, inputs, token_labels(), loss=language_loss, lengths=_LENGTHS, sequence=sequence)


_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
_T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "use_cache": False}
_T5 |= {"decoder_start_token_id": 0}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "use_cache": False,
    "pad_token_id": 1,
}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"max_position_embeddings": 64, "decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}

ENCODERS = [
    _classifier("bert", "BertForSequenceClassification", "BertConfig", masked=True),
    _classifier("roberta", "RobertaForSequenceClassification", "RobertaConfig"),
    _classifier("albert", "AlbertForSequenceClassification", "AlbertConfig", embedding_size=16),
    _classifier("electra", "ElectraForSequenceClassification", "ElectraConfig", embedding_size=16),
    _classifier("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", masked=True, **_DISTILBERT),
    _classifier("mpnet", "MPNetForSequenceClassification", "MPNetConfig"),
    _classifier("deberta", "DebertaForSequenceClassification", "DebertaConfig"),
    _classifier(
        "deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    _classifier("squeezebert", "SqueezeBertForSequenceClassification", "SqueezeBertConfig", embedding_size=32),
    _classifier("convbert", "ConvBertForSequenceClassification", "ConvBertConfig", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    _classifier("roformer", "RoFormerForSequenceClassification", "RoFormerConfig", embedding_size=32),
    _classifier("fnet", "FNetForSequenceClassification", "FNetConfig"),
    _classifier("nystromformer", "NystromformerForSequenceClassification", "NystromformerConfig", num_landmarks=8, segment_means_seq_len=8),
    _classifier("big_bird", "BigBirdForSequenceClassification", "BigBirdConfig", attention_type="original_full"),
    _classifier("modernbert", "ModernBertForSequenceClassification", "ModernBertConfig", local_attention=8, cls_token_id=1, sep_token_id=2),
    _classifier("xlm_roberta", "XLMRobertaForSequenceClassification", "XLMRobertaConfig"),
    _classifier("layoutlm", "LayoutLMForSequenceClassification", "LayoutLMConfig", max_2d_position_embeddings=32),
    _classifier("ibert", "IBertForSequenceClassification", "IBertConfig"),
    _classifier("rembert", "RemBertForSequenceClassification", "RemBertConfig", input_embedding_size=16, output_embedding_size=16),
    _classifier("mobilebert", "MobileBertForSequenceClassification", "MobileBertConfig", embedding_size=32, intra_bottleneck_size=32),
    Entry(
        "funnel",
        "text",
        wrapped(
            FromTokens,
            "FunnelForSequenceClassification",
            "FunnelConfig",
            vocab_size=VOCABULARY,
            block_sizes=[1, 1],
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=48,
            num_labels=CLASSES,
        ),
        tokens(),
        classes(),
        lengths=(8, 12),
        sequence={"input_ids": (1,)},
    ),
    _classifier("esm", "EsmForSequenceClassification", "EsmConfig", mask_token_id=3),
]

DECODERS = [
    _language("gpt2", "GPT2LMHeadModel", "GPT2Config", own_loss=True, **_GPT2),
    _language(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        use_cache=False,
    ),
    _language("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **(_USUAL | {"use_cache": False})),
    _language("gptj", "GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **_GPT2),
    _language("opt", "OPTForCausalLM", "OPTConfig", **(_USUAL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "use_cache": False})),
    _language("bloom", "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    _language("llama", "LlamaForCausalLM", "LlamaConfig", own_loss=True, **_GROUPED),
    _language("mistral", "MistralForCausalLM", "MistralConfig", sliding_window=4, **_GROUPED),
    _language("qwen2", "Qwen2ForCausalLM", "Qwen2Config", own_loss=True, **(_GROUPED | {"tie_word_embeddings": True})),
    _language("qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_GROUPED),
    _language("gemma", "GemmaForCausalLM", "GemmaConfig", head_dim=8, **_GROUPED),
    _language("gemma2", "Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=4, **_GROUPED),
    _language("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4, **_GROUPED),
    _language("phi", "PhiForCausalLM", "PhiConfig", **_GROUPED),
    _language("phi3", "Phi3ForCausalLM", "Phi3Config", own_loss=True, **_GROUPED),
    _language("falcon", "FalconForCausalLM", "FalconConfig", **(_USUAL | {"use_cache": False, "new_decoder_architecture": False})),
    _language("stablelm", "StableLmForCausalLM", "StableLmConfig", **_GROUPED),
    _language("olmo2", "Olmo2ForCausalLM", "Olmo2Config", **_GROUPED),
    _language("cohere", "CohereForCausalLM", "CohereConfig", **_GROUPED),
    _language("granite", "GraniteForCausalLM", "GraniteConfig", **_GROUPED),
    _language("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", **_GROUPED),
    _language("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", **_GROUPED),
    _language(
        "mpt", "MptForCausalLM", "MptConfig", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, use_cache=False
    ),
    _language("codegen", "CodeGenForCausalLM", "CodeGenConfig", rotary_dim=4, **_GPT2),
    _language(
        "openai_gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    _language("ctrl", "CTRLLMHeadModel", "CTRLConfig", dff=48, **_GPT2),
    _language("mixtral", "MixtralForCausalLM", "MixtralConfig", **_EXPERTS, **_GROUPED),
    _language(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        expand=2,
        time_step_rank=4,
        use_cache=False,
    ),
    _language("lfm2", "Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", "full_attention"], block_multiple_of=8, **_GROUPED),
]

ENCODER_DECODERS = [
    _two_texts("t5", "T5ForConditionalGeneration", "T5Config", own_loss=True, **_T5),
    _two_texts("mt5", "MT5ForConditionalGeneration", "MT5Config", feed_forward_proj="gated-gelu", **_T5),
    _two_texts("bart", "BartForConditionalGeneration", "BartConfig", **_BART),
    _two_texts("marian", "MarianMTModel", "MarianConfig", **_BART),
    _two_texts("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_BART),
    _two_texts("m2m_100", "M2M100ForConditionalGeneration", "M2M100Config", **_BART),
    _two_texts("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", **_BART),
]

ENTRIES = [*ENCODERS, *DECODERS, *ENCODER_DECODERS]
