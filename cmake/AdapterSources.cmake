# SPDX-License-Identifier: Apache-2.0
# In the wheel without torch: the sources of adapter and device that are compiled where a torch is (executor/at_hand), in shardplan/building/sources,
# and what they link that needs no torch, compiled here: the component adapter.
set(parts ${CMAKE_BINARY_DIR}/libshardplan_parts.a)
file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/parts.mri
     CONTENT "CREATE ${parts}
ADDLIB $<TARGET_FILE:shardplan_schemas>
ADDLIB $<TARGET_FILE:shardplan_checkpoints>
ADDLIB $<TARGET_FILE:shardplan_verifier>
ADDLIB $<TARGET_FILE:shardplan_replay>
ADDLIB $<TARGET_FILE:shardplan_run_options>
ADDLIB ${SHARDPLAN_DEFLATE}
SAVE
END
")
add_custom_command(OUTPUT ${parts} DEPENDS shardplan_schemas shardplan_checkpoints shardplan_verifier shardplan_replay shardplan_run_options ${CMAKE_BINARY_DIR}/parts.mri
                   COMMAND ${CMAKE_COMMAND} -E rm -f ${parts}
                   COMMAND sh -c "${CMAKE_AR} -M <parts.mri" WORKING_DIRECTORY ${CMAKE_BINARY_DIR} VERBATIM)
add_custom_target(adapter_parts DEPENDS ${parts})

set(sources shardplan/building/sources)
file(WRITE ${CMAKE_BINARY_DIR}/version ${PROJECT_VERSION})
install(FILES executor/at_hand/CMakeLists.txt ${CMAKE_BINARY_DIR}/version DESTINATION ${sources} COMPONENT adapter)
install(FILES ${parts} DESTINATION ${sources}/lib/${CMAKE_SYSTEM_PROCESSOR} COMPONENT adapter)
install(FILES cmake/FindTorchWheel.cmake DESTINATION ${sources}/cmake COMPONENT adapter)
install(DIRECTORY schemas/include/ schemas/checkpoints/include/ schemas/verifier/include/ DESTINATION ${sources}/include COMPONENT adapter FILES_MATCHING PATTERN "*.h")
install(DIRECTORY executor/ DESTINATION ${sources}/executor COMPONENT adapter
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cc" PATTERN "*/CMakeLists.txt" PATTERN "at_hand" EXCLUDE
        PATTERN "run/options.cc" EXCLUDE PATTERN "src/replay/*.cc" EXCLUDE PATTERN "src/virtual" EXCLUDE
        PATTERN "training/cpp" EXCLUDE PATTERN "tracer" EXCLUDE)
install(DIRECTORY device/ DESTINATION ${sources}/device COMPONENT adapter
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cc" PATTERN "CMakeLists.txt")
# torch's ProcessGroupGloo.hpp includes gloo's headers, which torch does not bring.
find_path(SHARDPLAN_GLOO gloo/algorithm.h REQUIRED)
install(DIRECTORY ${SHARDPLAN_GLOO}/gloo DESTINATION ${sources}/third_party COMPONENT adapter FILES_MATCHING PATTERN "*.h")
