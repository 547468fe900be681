# Builds only what specdec uses of llama-cpp-python's source distribution: llama.cpp's library and its backends.
# CMake includes this after `project(llama_cpp)` if CMAKE_PROJECT_llama_cpp_INCLUDE names it.

# The binding forces the cache's entry of this name; a variable hides it.
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)

# Most of a file's compile time is in the standard library's headers, and in optimizing what runs once per call or
# less: loading, graphs, grammars. What handles each token or each cell of a cache is optimized as ever.
function(specdec_compile_faster)
    target_precompile_headers(llama PRIVATE
        <algorithm> <array> <cmath> <fstream> <functional> <map> <memory> <mutex> <random> <regex> <set> <sstream>
        <string> <thread> <unordered_map> <vector>)
    target_compile_options(llama PRIVATE $<$<CONFIG:Release>:-O1>)
    get_target_property(folder llama SOURCE_DIR)
    foreach(name batch context graph kv-cache kv-cache-iswa memory-recurrent vocab)
        set_source_files_properties(${folder}/llama-${name}.cpp DIRECTORY ${folder} PROPERTIES
            COMPILE_OPTIONS -O3 SKIP_PRECOMPILE_HEADERS ON)  # which are compiled for one level of optimization
    endforeach()
endfunction()
cmake_language(DEFER CALL specdec_compile_faster)
