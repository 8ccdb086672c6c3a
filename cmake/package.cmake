# What goes into a wheel: the extension and the programs, the clusters, and the libraries that they need and a machine with
# torch need not have.
set(rpath_of_motley_python "$ORIGIN/lib:$ORIGIN/../torch/lib")
set(rpath_of_motley "$ORIGIN/../lib:$ORIGIN/../../torch/lib")
set(rpath_of_motley-torch "${rpath_of_motley}")
foreach(target motley_python motley motley-torch)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath_of_${target}}")
  # Not a RUNPATH: libraries in lib/ find each other by it too.
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endforeach()
install(TARGETS motley_python motley motley-torch RUNTIME_DEPENDENCY_SET libraries
        LIBRARY DESTINATION motley COMPONENT package RUNTIME DESTINATION motley/bin COMPONENT package)
install(RUNTIME_DEPENDENCY_SET libraries DESTINATION motley/lib COMPONENT package
        PRE_EXCLUDE_REGEXES "^lib(torch|c10|shm|gomp|cu|nv|nccl)" "^lib(c|m|dl|rt|pthread|stdc\\+\\+|gcc_s)\\.so" "^ld-linux")
install(FILES ${CMAKE_BINARY_DIR}/python/motley/_built.py DESTINATION motley COMPONENT package)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/clusters DESTINATION motley COMPONENT package)
