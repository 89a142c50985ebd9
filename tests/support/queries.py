"""The smallest detectors of transformers, as folders."""

from pathlib import Path
from typing import Any

SMALL = {
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "encoder_layers": 1,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2,
    "decoder_layers": 2,
    "d_model": 32,
    "num_queries": 20,
}
HYBRID = {**SMALL, "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32], "num_denoising": 10}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic", "embedding_size": 8}
LAST_THREE = ["stage2", "stage3", "stage4"]
FAMILIES = ("rt_detr_v2", "d_fine", "detr")


def write_detector(family: str, folder: Path) -> Path:
    """config.json and preprocessor_config.json."""
    import transformers

    processor: Any = transformers.RTDetrImageProcessor()
    config: Any
    if family == "rt_detr_v2":
        backbone = transformers.RTDetrResNetConfig(out_features=LAST_THREE, **STAGES)
        config = transformers.RTDetrV2Config(
            backbone_config=backbone, encoder_in_channels=[16, 24, 32], **HYBRID
        )
    elif family == "d_fine":
        widths = {"hidden_sizes": [16, 24, 32, 40], "stage_out_channels": [16, 24, 32, 40]}
        backbone = transformers.HGNetV2Config(
            stem_channels=[3, 8, 8],
            stage_in_channels=[8, 16, 24, 32],
            stage_mid_channels=[8] * 4,
            stage_num_blocks=[1] * 4,
            stage_numb_of_layers=[2] * 4,
            out_features=LAST_THREE,
            **widths,
        )
        config = transformers.DFineConfig(
            backbone_config=backbone, encoder_in_channels=[24, 32, 40], **HYBRID
        )
    else:
        backbone = transformers.ResNetConfig(out_features=["stage4"], **STAGES)
        own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        config = transformers.DetrConfig(backbone_config=backbone, **own, **SMALL)
        processor = transformers.DetrImageProcessor()
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
