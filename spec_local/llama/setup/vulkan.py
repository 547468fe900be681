"""What llama.cpp's Vulkan backend uses of Vulkan's headers, and those of Debian 12 and Ubuntu 22.04 lack."""

from pathlib import Path

# Headers before 1.3.272 (Debian 12 has 1.3.239) do not declare two structures, with which ggml sets up the
# validation layer. Without that layer, the loader ignores what it is given here in their place.
_LATER_HEADER = """#pragma once
#include_next <vulkan/vulkan.hpp>
#if VK_HEADER_VERSION < 272
namespace VULKAN_HPP_NAMESPACE {
enum class LayerSettingTypeEXT { eBool32 };
struct LayerSettingEXT {
    const char * layer;
    const char * setting;
    LayerSettingTypeEXT type;
    uint32_t count;
    const void * values;
};
struct LayerSettingsCreateInfoEXT : ValidationFeaturesEXT {
    template <typename Settings> explicit LayerSettingsCreateInfoEXT(const Settings &) {}
};
}  // namespace VULKAN_HPP_NAMESPACE
#endif
"""


def later_headers(folder: Path) -> Path:
    """Write headers that complete the installed ones, for the compiler's -I; returns the folder."""
    header = folder / "vulkan/vulkan.hpp"
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists() or header.read_text() != _LATER_HEADER:  # a newer file would compile all again
        header.write_text(_LATER_HEADER)
    return folder
