# SPDX-License-Identifier: Apache-2.0
# shardplan_add_policy(NAME SOURCE...): NAME.so with a policy for `shardplan plan --policy-library`
# (shardplan/planner/policy.h). It links nothing: the program that loads it has what it calls.
function(shardplan_add_policy name)
  add_library(${name} MODULE ${ARGN})
  set_target_properties(${name} PROPERTIES PREFIX "" CXX_EXTENSIONS OFF)
  target_link_libraries(${name} PRIVATE shardplan::policy)
endfunction()
