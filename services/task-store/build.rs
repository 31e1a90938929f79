//! Generates the types of what the service stores. Everything else comes from `rialto-a2a` and `rialto-rpc`.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true).include_source_info(true).open_file("rialto/tasks/v1/stored.proto")?;
    let descriptors = prost_types::FileDescriptorSet::decode(compiler.encode_file_descriptor_set().as_slice())?;

    let mut config = tonic_prost_build::Config::new();
    config.btree_map(["."]).bytes(["."]).compile_well_known_types();
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .extern_path(".google.protobuf", "::rialto_a2a::wkt")
        .extern_path(".lf.a2a.v1", "::rialto_a2a::v1")
        .extern_path(".rialto.tasks.v1.Scope", "::rialto_rpc::tasks::Scope")
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}
