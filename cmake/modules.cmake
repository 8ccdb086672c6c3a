# A module is one folder of src/ and one static library, motley_<name>, built from every .cc in it.
#   motley_module(shard MODULES graph core LIBS fmt::fmt)
# x_test.cc files of the module become the test program test_<name>. tools/check_includes.py checks that the includes of
# a module name only itself and the modules it is linked with here.
# Errors in the compilers that developers and CI have (the presets); another one may warn of headers of libraries.
option(MOTLEY_WARNINGS_ARE_ERRORS "Warnings are errors" OFF)
set(MOTLEY_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers)
if(MOTLEY_WARNINGS_ARE_ERRORS)
  list(APPEND MOTLEY_WARNINGS -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of sums of strings where nothing is wrong (its bugs 105329 and 105651), depending on how long a path is.
  list(APPEND MOTLEY_WARNINGS -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread)
  if(MOTLEY_SANITIZE MATCHES address)  # it finds <regex> and libtorch's optional uninitialized, where nothing is amiss (bug 105562)
    list(APPEND MOTLEY_WARNINGS -Wno-maybe-uninitialized)
  endif()
endif()
# Modules also become part of the Python module, a shared object; nobody replaces their functions.
set(MOTLEY_SHARED -fPIC -fno-semantic-interposition)

# Most of the compiler's time for tests, commands and models went to optimizing what runs once, and to headers of libraries.
set(MOTLEY_RUNS_ONCE $<$<CONFIG:Release>:-O1>)

# Headers of libraries are precompiled, for targets compiled in the same way; check_includes.py still sees what a file includes.
# clang-tidy cannot read what GCC precompiles.
set(MOTLEY_PRECOMPILES OFF)
if(MOTLEY_PRECOMPILED AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set(MOTLEY_PRECOMPILES ON)
endif()
function(motley_precompile target)  # for itself; headers follow
  if(MOTLEY_PRECOMPILES)
    target_precompile_headers(${target} PRIVATE <algorithm> <functional> <map> <memory> <string> <unordered_map> <vector>
                                                <fmt/format.h> <nlohmann/json.hpp> ${ARGN})
  endif()
endfunction()
function(motley_precompiled_library target)  # for others
  if(MOTLEY_PRECOMPILES)
    cmake_parse_arguments(ARG "" "" "OPTIONS;HEADERS;LIBS" ${ARGN})
    file(WRITE ${CMAKE_BINARY_DIR}/precompiled.cc "")
    add_library(${target} OBJECT ${CMAKE_BINARY_DIR}/precompiled.cc)
    target_compile_options(${target} PRIVATE ${MOTLEY_WARNINGS} ${ARG_OPTIONS})
    target_link_libraries(${target} PRIVATE ${MOTLEY_PRINTING} nlohmann_json::nlohmann_json ${ARG_LIBS})
    motley_precompile(${target} ${ARG_HEADERS})
  endif()
endfunction()
motley_precompiled_library(motley_precompiled_plain OPTIONS ${MOTLEY_SHARED})
if(MOTLEY_TESTS)
  motley_precompiled_library(motley_precompiled_tests OPTIONS ${MOTLEY_RUNS_ONCE} HEADERS <gmock/gmock.h> <gtest/gtest.h>
                             LIBS GTest::gtest GTest::gmock)
endif()

# Most of the time of a file that includes libtorch went to its headers.
if(MOTLEY_TORCH)
  motley_precompiled_library(motley_precompiled OPTIONS ${MOTLEY_SHARED} HEADERS <ATen/ATen.h> LIBS motley_libtorch)
  if(MOTLEY_TESTS)
    motley_precompiled_library(motley_precompiled_torch_tests OPTIONS ${MOTLEY_RUNS_ONCE} HEADERS <gmock/gmock.h> <gtest/gtest.h> <ATen/ATen.h>
                               LIBS GTest::gtest GTest::gmock motley_libtorch)
  endif()
endif()

# Several files of a target are compiled as one: what they include, and the templates they share, are compiled once.
function(motley_unite target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${MOTLEY_PRECOMPILES} UNITY_BUILD_BATCH_SIZE 6)
endfunction()

# With libtorch's headers; `plain` without.
function(motley_precompiled target)
  if(MOTLEY_PRECOMPILES)
    set(from motley_precompiled)
    if(ARGN STREQUAL plain)
      set(from motley_precompiled_plain)
    endif()
    target_precompile_headers(${target} REUSE_FROM ${from})
    target_compile_options(${target} PRIVATE ${MOTLEY_SHARED})
  endif()
endfunction()

# What does without libtorch is the same for every torch: a second build folder (the preset torch2) takes it from the first.
set(MOTLEY_PLAIN_FROM "" CACHE PATH "A build folder of these sources whose libraries without libtorch are used; empty: they are built")
function(motley_import target)
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  set(file ${MOTLEY_PLAIN_FROM}/${folder}/lib${target}.a)
  add_library(${target} STATIC IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${file})
  target_include_directories(${target} INTERFACE ${PROJECT_SOURCE_DIR}/src)
  add_dependencies(${target} motley_plain)
  set_property(GLOBAL APPEND PROPERTY MOTLEY_IMPORTED ${target})
  set_property(GLOBAL APPEND PROPERTY MOTLEY_IMPORTED_FILES ${file})
endfunction()
function(motley_imported)  # after all of them
  get_property(targets GLOBAL PROPERTY MOTLEY_IMPORTED)
  get_property(files GLOBAL PROPERTY MOTLEY_IMPORTED_FILES)
  if(targets)
    add_custom_target(motley_plain COMMAND ${CMAKE_COMMAND} --build ${MOTLEY_PLAIN_FROM} --target ${targets} BYPRODUCTS ${files} VERBATIM USES_TERMINAL)
  endif()
endfunction()

function(motley_module name)
  cmake_parse_arguments(ARG "SERIAL" "" "MODULES;LIBS;TEST_LIBS" ${ARGN})
  if(ARG_SERIAL)  # of its tests
    set(serial SERIAL)
  endif()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  list(FILTER sources EXCLUDE REGEX "main\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM ARG_MODULES PREPEND motley_ OUTPUT_VARIABLE modules)
  if(MOTLEY_PLAIN_FROM AND NOT motley_libtorch IN_LIST ARG_LIBS)
    motley_import(motley_${name})
    target_link_libraries(motley_${name} INTERFACE ${modules} ${ARG_LIBS})
    return()
  endif()
  add_library(motley_${name} STATIC ${sources})
  target_compile_options(motley_${name} PRIVATE ${MOTLEY_WARNINGS} ${MOTLEY_SHARED})
  target_include_directories(motley_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(motley_${name} PUBLIC ${modules} ${ARG_LIBS})
  motley_unite(motley_${name})
  if(motley_libtorch IN_LIST ARG_LIBS)
    motley_precompiled(motley_${name})
  else()
    motley_precompiled(motley_${name} plain)
  endif()
  if(tests AND MOTLEY_TESTS)
    motley_test(test_${name} ${serial} SOURCES ${tests} LIBS motley_${name} ${ARG_TEST_LIBS})
  endif()
endfunction()

# motley_test(name SOURCES a_test.cc ... LIBS ...): a GoogleTest program, one ctest entry. Others run beside it unless SERIAL
# is given: of what starts workers or measures time.
function(motley_test name)
  cmake_parse_arguments(ARG "SERIAL" "TIMEOUT" "SOURCES;LIBS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  if(MOTLEY_SANITIZE)
    set(ARG_TIMEOUT 1800)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_compile_options(${name} PRIVATE ${MOTLEY_WARNINGS} ${MOTLEY_RUNS_ONCE})
  target_compile_definitions(${name} PRIVATE MOTLEY_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                             MOTLEY_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} GTest::gtest_main GTest::gmock)
  if(MOTLEY_PRECOMPILES AND ARG_LIBS MATCHES "motley_(capture|comm|discover|interpret|measure|mutants|runtime|soundness|zoo)")
    target_precompile_headers(${name} REUSE_FROM motley_precompiled_torch_tests)
  elseif(MOTLEY_PRECOMPILES)
    target_precompile_headers(${name} REUSE_FROM motley_precompiled_tests)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  # Threads of workers, and tests beside one another, have the cores: OpenBLAS would have more threads wait for them in a loop.
  set_tests_properties(${name} PROPERTIES LABELS program TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${ARG_SERIAL} ENVIRONMENT "OPENBLAS_NUM_THREADS=1;OMP_NUM_THREADS=1;XDG_CACHE_HOME=${CMAKE_BINARY_DIR}/cache")
endfunction()
