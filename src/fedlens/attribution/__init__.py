"""What a network looks at: gradients, relevance, class activation maps, layer and channel saliency, masks."""

from .attribute import METHODS, attribute
from .cam import GradCam, GradCamPlusPlus, ScoreCam
from .channels import ChannelTaps, channel_gradients, layer_names, layer_saliency
from .figures import draw_grid, explain
from .lrp import Lrp
from .masks import kept, normalised, top_share
from .similarity import cosine, psnr, rank_correlation, ssim
