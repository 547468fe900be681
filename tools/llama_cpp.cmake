# Builds only what specdec uses of llama-cpp-python's source distribution: llama.cpp's library, its backends, and
# libmtmd, which reads pictures.
# CMake includes this after `project(llama_cpp)` if CMAKE_PROJECT_llama_cpp_INCLUDE names it.

# The binding forces the cache's entry of this name; a variable hides it.
set(LLAMA_BUILD_COMMON OFF)
# With it, libmtmd starts the first program on the PATH that is called ffmpeg, and gives it data of a request.
set(MTMD_VIDEO OFF CACHE BOOL "" FORCE)

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
    if(TARGET mtmd)
        specdec_compile_mtmd_faster()
    endif()
endfunction()

# A picture's time is in ggml, and in what resizes it. The files of the models, small and many, are compiled together.
# Pictures come as pixels: the decoders of files, in mtmd-helper.cpp, are not used.
function(specdec_compile_mtmd_faster)
    get_target_property(folder mtmd SOURCE_DIR)
    target_precompile_headers(mtmd PRIVATE
        <algorithm> <array> <cmath> <fstream> <functional> <map> <memory> <random> <sstream> <string> <unordered_set>
        <vector> ${folder}/models/models.h)
    target_compile_options(mtmd PRIVATE $<$<CONFIG:Release>:-O1>)
    set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    foreach(name clip mtmd mtmd-audio mtmd-helper mtmd-helper-gen mtmd-image)
        set_source_files_properties(${folder}/${name}.cpp DIRECTORY ${folder} PROPERTIES
            SKIP_UNITY_BUILD_INCLUSION ON)
    endforeach()
    foreach(name mtmd-helper mtmd-helper-gen)  # they define macros of the models' headers themselves
        set_source_files_properties(${folder}/${name}.cpp DIRECTORY ${folder} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endforeach()
    set_source_files_properties(${folder}/mtmd-image.cpp DIRECTORY ${folder} PROPERTIES
        COMPILE_OPTIONS -O3 SKIP_PRECOMPILE_HEADERS ON)
endfunction()
cmake_language(DEFER CALL specdec_compile_faster)
