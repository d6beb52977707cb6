"""Unmodified Hugging Face models from small configurations: the chain does what the model does."""

import logging

import pytest
import torch

from plait.chain import Chain
from plait.errors import TraceError
from plait.visit import Walk

transformers = pytest.importorskip("transformers")

WORDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(WORDS)
MASK[:, -3:] = 0
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def gpt2(**options):
    config = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, **ends, **options}))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=100))


def t5():
    config = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, decoder_start_token_id=0))


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config)


def resnet():
    config = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "bottleneck"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**config))


def neox():
    config = transformers.GPTNeoXConfig(**SIZES, vocab_size=100)
    return transformers.GPTNeoXForCausalLM(config)


def convnext():
    config = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**config))


def whisper(**options):
    config = {"vocab_size": 100, "d_model": 32, "num_mel_bins": 8, "dropout": 0.1}
    lengths = {"max_source_positions": 8, "max_target_positions": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.WhisperConfig(**config, **lengths, **ends, **sides, **options)
    return transformers.WhisperForConditionalGeneration(config)


def opt():
    config = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"ffn_dim": 64, "max_position_embeddings": 16, "word_embed_proj_dim": 32}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**config, **sizes))


def layers(pattern, count):
    return [name.format(layer) for layer in range(count) for name in pattern]


TEXT = {"input_ids": WORDS, "labels": WORDS}
BLOCKS = {
    gpt2: (
        TEXT,
        [
            "transformer.wte",
            "transformer.wpe",
            *layers(["transformer.h.{}.attn", "transformer.h.{}.mlp"], 2),
            "lm_head",
        ],
    ),
    bert: (
        {**TEXT, "attention_mask": MASK},
        [
            "bert.embeddings",
            "bert.embeddings.position_embeddings",
            *layers(["bert.encoder.layer.{}.attention", "bert.encoder.layer.{}"], 2),
            "cls.predictions.transform.dense",
            "cls.predictions.decoder",
        ],
    ),
    t5: (
        TEXT,
        [
            "encoder.embed_tokens",
            *layers(["encoder.block.{}.layer.0.SelfAttention", "encoder.block.{}.layer.1.DenseReluDense"], 2),
            "decoder.embed_tokens",
            *layers(
                [
                    "decoder.block.{}.layer.0.SelfAttention",
                    "decoder.block.{}.layer.1.EncDecAttention",
                    "decoder.block.{}.layer.2.DenseReluDense",
                ],
                2,
            ),
            "lm_head",
        ],
    ),
    vit: (
        {"pixel_values": IMAGES},
        [
            "vit.embeddings.patch_embeddings.projection",
            *layers(["vit.layers.{}.attention", "vit.layers.{}.mlp"], 2),
            "classifier",
        ],
    ),
    resnet: (
        {"pixel_values": IMAGES},
        [
            "resnet.embedder.embedder.convolution",
            "resnet.encoder.stages.0.layers.0.layer",
            "resnet.encoder.stages.0.layers.1.layer",
            "resnet.encoder.stages.1.layers.0",
            "classifier.1",
        ],
    ),
    convnext: (
        {"pixel_values": IMAGES},
        [
            "convnext.embeddings.patch_embeddings",
            "convnext.encoder.stages.0.layers.0",
            "convnext.encoder.stages.1.downsampling_layer.1",
            "convnext.encoder.stages.1.layers.0",
            "classifier",
        ],
    ),
    whisper: (
        {"input_features": SOUND, "labels": WORDS},
        [
            "model.encoder.conv1",
            "model.encoder.conv2",
            "model.encoder.embed_positions",
            "model.encoder.layers.0.self_attn",
            "model.encoder.layers.0",
            "model.decoder",
            "model.decoder.layers.0",
            "proj_out",
        ],
    ),
    opt: (
        TEXT,
        [
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            *layers(["model.decoder.layers.{}.self_attn", "model.decoder.layers.{}"], 2),
            "lm_head",
        ],
    ),
    neox: (TEXT, ["gpt_neox.embed_in", *layers(["gpt_neox.layers.{}"], 2), "lm_head"]),
}


NOT_ONE_ROW = {resnet}
"""BatchNorm at the end of it, where a picture is one pixel, refuses a single row."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def checked(same):
    """The chain of a model, traced and compared with the model once."""
    chains = {}

    def chain_of(factory):
        if factory not in chains:
            steps = {3: 3} if factory in NOT_ONE_ROW else {1: 1, 3: 3}
            chains[factory] = same(lambda: factory().train(), (), BLOCKS[factory][0], batches=steps)
        return chains[factory]

    return chain_of


@pytest.mark.parametrize("factory", BLOCKS, ids=lambda factory: factory.__name__)
def test_the_chain_does_what_the_model_does(factory, checked):
    assert [block.name for block in checked(factory)] == BLOCKS[factory][1]


def test_tied_weights_are_found(checked):
    assert checked(gpt2).tied == {"transformer.wte.weight": (0, 6)}
    assert checked(t5).tied == {"shared.weight": (0, 5, 12)}


def test_hidden_states_that_are_returned_do_not_hinder_cutting():
    chain = Chain.trace(gpt2(n_layer=1, output_hidden_states=True), TEXT)
    assert [block.name for block in chain] == [BLOCKS[gpt2][1][place] for place in (0, 1, 2, 3, -1)]


def test_a_causal_model_passes_nothing_but_its_hidden_state(checked):
    """No mask crosses the cuts: the recording computes what training does, not what an export would."""
    chain = checked(gpt2)
    for place in range(1, len(chain)):
        assert set(chain.live(place)) == {"input:labels", *chain[place - 1].writes}
        assert len(chain[place - 1].writes) == 1


def test_what_is_no_tensor_in_the_output_becomes_none(checked):
    chain = checked(gpt2)
    args, kwargs = chain.example(2)
    assert chain(*args, **kwargs).past_key_values is None
    assert chain.model(*args, **kwargs).past_key_values is not None


@pytest.mark.parametrize("factory", [gpt2, resnet], ids=lambda factory: factory.__name__)
def test_under_autocast(factory, checked):
    """Model and chain run in bfloat16 alike; the recording holds for both precisions here."""
    chain = checked(factory)
    args, kwargs = chain.example(3)
    walk, found = Walk(chain), []
    for run in (chain.model, chain, walk.forward):
        buffers = {name: buffer.clone() for name, buffer in chain.model.named_buffers()}
        for parameter in chain.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            output = run(*args, **kwargs)
            loss = output.logits.float().pow(2).mean()
        (walk.backward if run == walk.forward else torch.Tensor.backward)(loss)
        found.append([output.logits.detach(), *(p.grad for p in chain.parameters())])
        for name, buffer in chain.model.named_buffers():
            buffer.copy_(buffers[name])
    assert found[0][0].dtype == torch.bfloat16
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_layers_that_are_dropped_at_random_are_refused():
    with pytest.raises(TraceError, match=r"with probability 0\.1, as LayerDrop does .*layerdrop=0\.0"):
        Chain.trace(whisper(encoder_layerdrop=0.1), BLOCKS[whisper][0])
