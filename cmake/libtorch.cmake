# libtorch, as the target motley_libtorch. Debian's libtorch-dev puts its headers on the default path except those of the
# C++ front end.
find_library(TORCH_LIBRARY torch REQUIRED)
find_library(TORCH_CPU_LIBRARY torch_cpu REQUIRED)
find_library(C10_LIBRARY c10 REQUIRED)
find_path(TORCH_API_INCLUDE torch/nn/module.h REQUIRED PATH_SUFFIXES torch/csrc/api/include)
add_library(motley_libtorch INTERFACE)
target_include_directories(motley_libtorch SYSTEM INTERFACE ${TORCH_API_INCLUDE})
# c10d's gloo headers are empty without it.
target_compile_definitions(motley_libtorch INTERFACE USE_C10D_GLOO)
target_link_libraries(motley_libtorch INTERFACE ${TORCH_LIBRARY} ${TORCH_CPU_LIBRARY} ${C10_LIBRARY})

# NCCL, where libtorch is built with it and the headers that its own headers include are there.
find_library(TORCH_CUDA_LIBRARY torch_cuda)
find_library(C10_CUDA_LIBRARY c10_cuda)
find_library(CUDART_LIBRARY cudart PATHS /usr/local/cuda PATH_SUFFIXES lib64)
find_path(C10D_NCCL_INCLUDE torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp)
find_path(NCCL_INCLUDE nccl.h PATHS /usr/local/cuda/include)
find_path(CUDA_INCLUDE cuda_runtime_api.h PATHS /usr/local/cuda/include)
if(TORCH_CUDA_LIBRARY AND C10_CUDA_LIBRARY AND CUDART_LIBRARY AND C10D_NCCL_INCLUDE AND NCCL_INCLUDE AND CUDA_INCLUDE)
  target_compile_definitions(motley_libtorch INTERFACE USE_C10D_NCCL)
  target_include_directories(motley_libtorch SYSTEM INTERFACE ${C10D_NCCL_INCLUDE} ${NCCL_INCLUDE} ${CUDA_INCLUDE})
  target_link_libraries(motley_libtorch INTERFACE ${TORCH_CUDA_LIBRARY} ${C10_CUDA_LIBRARY} ${CUDART_LIBRARY})
endif()
