# libtorch, as the target motley_libtorch: that of the Python for which motley is built, MOTLEY_PYTHON_PROGRAM, where its torch
# is a wheel of the package index; Debian's libtorch-dev otherwise.
#
# A wheel has no headers of gloo and need not have those of NCCL: process groups are made by torch.distributed when the
# workers start (comm/group_maker.h). Debian's libtorch has gloo's, and makes its groups without Python.
option(MOTLEY_PYTHON "Build the Python package" ON)
set(MOTLEY_PYTHON_PROGRAM "" CACHE FILEPATH "The Python interpreter that has torch; empty: the first one that has it")

# Sets TORCH_FACTS to "version;folder;whether its strings are those of C++11" as this interpreter says, or to nothing.
function(ask_torch program)
  # pip hides an environment's packages from what it builds by PYTHONPATH.
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH ${program} -c "import torch, os; print(torch.__version__, os.path.dirname(torch.__file__), int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';', end='')"
                  OUTPUT_VARIABLE facts RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed EQUAL 0)
    set(facts "")
  endif()
  set(TORCH_FACTS "${facts}" PARENT_SCOPE)
endfunction()

# Debian's python3-torch belongs to /usr/bin/python3, which need not be the first python3 found; an environment that is active
# goes first.
if(MOTLEY_PYTHON_PROGRAM)
  ask_torch(${MOTLEY_PYTHON_PROGRAM})
  if(NOT TORCH_FACTS)
    message(FATAL_ERROR "${MOTLEY_PYTHON_PROGRAM} has no torch; install it there, or leave MOTLEY_PYTHON_PROGRAM away")
  endif()
else()
  foreach(program ${Python3_EXECUTABLE} ${Python_EXECUTABLE} $ENV{VIRTUAL_ENV}/bin/python /usr/bin/python3 python3)
    ask_torch(${program})
    if(TORCH_FACTS)
      set(MOTLEY_PYTHON_PROGRAM ${program} CACHE FILEPATH "" FORCE)
      break()
    endif()
  endforeach()
endif()
if(MOTLEY_PYTHON AND NOT TORCH_FACTS)
  message(FATAL_ERROR "No Python interpreter has torch: install python3-torch, or configure with -DMOTLEY_PYTHON=OFF")
endif()
if(TORCH_FACTS)
  list(GET TORCH_FACTS 0 MOTLEY_TORCH_VERSION)
  list(GET TORCH_FACTS 1 torch_folder)
  list(GET TORCH_FACTS 2 new_strings)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_release ${MOTLEY_TORCH_VERSION})
endif()

add_library(motley_libtorch INTERFACE)
set(MOTLEY_TORCH_WHEEL OFF)
if(TORCH_FACTS AND NOT torch_release VERSION_EQUAL 1.13)
  set(MOTLEY_TORCH_WHEEL ON)
  if(torch_release VERSION_LESS 2.4)
    message(FATAL_ERROR "${MOTLEY_PYTHON_PROGRAM} has torch ${MOTLEY_TORCH_VERSION}; motley needs 2.4 or newer, or Debian's 1.13")
  endif()
  if(NOT EXISTS ${torch_folder}/include/ATen)
    message(FATAL_ERROR "The torch of ${MOTLEY_PYTHON_PROGRAM} has no headers in ${torch_folder}/include; install a wheel of it")
  endif()
  # Wheels of the package index up to 2.6: the std::string of before C++11. Libraries of the system cannot be called with it;
  # {fmt} and spdlog are compiled along, and yaml-cpp is called through C (core/yaml_library.h).
  if(NOT new_strings)
    if(MOTLEY_TESTS OR MOTLEY_PLAIN_FROM)
      message(FATAL_ERROR "torch ${MOTLEY_TORCH_VERSION} has the strings of before C++11: configure with -DMOTLEY_TESTS=OFF, without MOTLEY_PLAIN_FROM")
    endif()
    add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=0)
    set(MOTLEY_PRINTING fmt::fmt-header-only spdlog::spdlog_header_only)
  endif()
  set(torch_libraries ${torch_folder}/lib)
  set(TORCH_PYTHON_LIBRARY ${torch_libraries}/libtorch_python.so)
  # The wheel brings headers of another {fmt} than the one that motley links.
  find_path(FMT_INCLUDE fmt/format.h REQUIRED)
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/first)
  file(CREATE_LINK ${FMT_INCLUDE}/fmt ${CMAKE_BINARY_DIR}/first/fmt SYMBOLIC)
  target_include_directories(motley_libtorch SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/first ${torch_folder}/include
                                                              ${torch_folder}/include/torch/csrc/api/include)
  target_link_libraries(motley_libtorch INTERFACE ${torch_libraries}/libtorch.so ${torch_libraries}/libtorch_cpu.so
                                                  ${torch_libraries}/libc10.so)
else()
  find_library(TORCH_LIBRARY torch REQUIRED)
  find_library(TORCH_CPU_LIBRARY torch_cpu REQUIRED)
  find_library(C10_LIBRARY c10 REQUIRED)
  find_library(TORCH_PYTHON_LIBRARY torch_python)
  # Debian's libtorch-dev puts its headers on the default path except those of the C++ front end.
  find_path(TORCH_API_INCLUDE torch/nn/module.h REQUIRED PATH_SUFFIXES torch/csrc/api/include)
  target_include_directories(motley_libtorch SYSTEM INTERFACE ${TORCH_API_INCLUDE})
  target_link_libraries(motley_libtorch INTERFACE ${TORCH_LIBRARY} ${TORCH_CPU_LIBRARY} ${C10_LIBRARY})
  if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)  # in C++20 clang reads torch 1.13's headers with this one first
    target_compile_options(motley_libtorch INTERFACE "SHELL:-include ATen/core/ivalue.h")
  endif()
endif()
