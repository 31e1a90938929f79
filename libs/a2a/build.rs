//! Generates the A2A types, their ProtoJSON and the descriptor from `proto/a2a`.

use std::{env, error::Error, fs, io::Write, path::PathBuf};

use prost::Message;

/// Its four fields are written even when empty (spec §3.1.4); no other message's are.
const ALWAYS_WRITTEN: &str = ".lf.a2a.v1.ListTasksResponse";

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed={}", root.join("a2a").display());
    println!("cargo:rerun-if-changed={}", root.join("google").display());

    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true).include_source_info(true).open_file("a2a/v1/a2a.proto")?;
    // Encoded by protox itself: the decoded form would lose the field_behavior options.
    fs::write(out.join("a2a.bin"), {
        let mut bare = protox::Compiler::new([&root])?;
        bare.include_imports(true).open_file("a2a/v1/a2a.proto")?;
        bare.encode_file_descriptor_set()
    })?;
    let descriptors = compiler.file_descriptor_set();

    let mut config = tonic_prost_build::Config::new();
    config
        .btree_map(["."])
        .bytes(["."])
        .compile_well_known_types()
        .extern_path(".google.protobuf", "crate::wkt")
        .disable_comments([".google.api"]);
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .compile_fds_with_config(descriptors.clone(), config)?;

    let encoded = descriptors.encode_to_vec();
    let json = |always: bool| -> Result<Vec<u8>, Box<dyn Error>> {
        let mut builder = pbjson_build::Builder::new();
        builder
            .register_descriptors(&encoded)?
            .extern_path(".google.protobuf", "crate::wkt")
            .btree_map(["."])
            .ignore_unknown_fields();
        let (prefix, builder) = match always {
            true => (ALWAYS_WRITTEN, builder.emit_fields()),
            false => (".lf.a2a.v1", builder.exclude([ALWAYS_WRITTEN])),
        };
        Ok(builder.generate(&[prefix], |_| Ok(Vec::new()))?.into_iter().flat_map(|(_, code)| code).collect())
    };
    let mut file = fs::File::create(out.join("lf.a2a.v1.serde.rs"))?;
    file.write_all(&json(false)?)?;
    file.write_all(&json(true)?)?;
    Ok(())
}
